"""The state of a job as one frame for a terminal."""

from __future__ import annotations

from odyssey_megatron.inputs import printable
from odyssey_megatron.metrics.live import Live
from odyssey_megatron.metrics.map import (
    cell_text,
    excluded,
    factor_text,
    given_up_text,
    goodput_rows,
    heat,
    layers_text,
    margin_rows,
    rows_of,
    span_seconds,
    stage_spans,
)
from odyssey_megatron.metrics.run import milliseconds, text_table
from odyssey_megatron.metrics.standing import DEAD, JOINS, SHADOW, TRAINS, WAITS, MapPlace

_HEAT = (22, 58, 136, 172, 202, 196)
"""Background colours, of the 256 that terminals have, from as fast as others to half as fast and less."""
_STATUS = {DEAD: 232, JOINS: 24, SHADOW: 60, WAITS: 236, TRAINS: 238}
_SILENT_S, _SILENT_STEPS = 60.0, 5
"""A running job says something at least so often, and in so many of its steps."""
_STALLS, _CANDIDATES, _MARGINS = 6, 6, 6


def frame(state: Live, *, now_s: float, width: int = 100, colours: bool = True) -> str:
    """Return all lines of the frame, without a line break behind the last."""
    return "\n".join(
        [
            *_head(state, now_s),
            "",
            *_heat_map(state, width, colours),
            *_survives(state),
            *_goodput(state),
            *_stalls(state),
            *_decision(state, width),
            *_findings(state),
        ]
    )


def _head(state: Live, now_s: float) -> list[str]:
    over, silent = f"ended: {state.verdict}" if state.is_over else state.status, ""
    if state.heard_s is not None and not state.is_over:
        silent_s = max(0.0, now_s - state.heard_s)
        silent = f" · last line {silent_s:.1f} s ago"
        if silent_s > max(_SILENT_S, _SILENT_STEPS * (state.step_s or 0.0)):
            over += ", if it still runs"  # a journal that was cut off has no last word
    last = state.steps[-1] if state.steps else None
    nothing = "its steps are in its output (--odyssey observe)" if state.observes else "no step yet"
    numbers = [
        f"step {last.step:,} (iteration {last.step + 1:,})" if last else nothing,
        f"loss {last.loss:.6g}" if last else "",
        f"step time {_s(state.step_s)} (ideal {_s(state.goodput.ideal_step_s)}, planned {_s(state.planned_step_s)})",
        f"{state.tokens_per_s:,.0f} tokens/s" if state.tokens_per_s else "",
        "" if state.goodput.share is None else f"goodput {state.goodput.share:.2%}",
    ]
    here = state.standing
    lines = (
        f"odyssey {state.name} · {over}{silent}",
        " · ".join(one for one in numbers if one),
        f"{state.living} of {state.world_size} ranks live · generation {here.generation} {state.policy} · "
        f"{_count(here.survives, 'more worker')} and {_count(here.survives_nodes, 'more node')} can be lost at once",
    )
    return [printable(one) for one in lines]


def _s(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.3g} s"


def _count(number: int | None, what: str) -> str:
    return f"? {what}s" if number is None else f"{max(number, 0)} {what}{'s' * (number != 1)}"


def _heat_map(state: Live, width: int, colours: bool) -> list[str]:
    rows, total, seconds = rows_of(state), state.standing.num_layers, span_seconds(state.costs)
    if not rows:
        return []
    heads = []
    for stage, row in rows:
        spans = stage_spans(row) or ()
        took_s = sum(seconds.get(span, 0.0) for span in spans)
        layers = layers_text(row, total, "+")
        time = f" {took_s * 1e3:.3g} ms" if took_s else ""
        heads.append(f"stage {stage} {layers}{time}" if stage >= 0 else "spare")
    margin = max(len(one) for one in heads) + 1
    columns = state.standing.replicas
    each = next((one for one in (5, 3, 2) if margin + one * columns <= width), 1)
    shown = max(1, min(columns, (width - margin) // each))
    lines = ["stages × replicas: times as long as others take for the same work"]
    for head, (_, row) in zip(heads, rows, strict=True):
        cells = "".join(_cell(one, each, colours) for one in row[:shown])
        lines.append(f"{head:<{margin}}{cells}" + ("…" if shown < columns else ""))
    smaller = [one for one in state.standing.places if len(one.ranks) < one.whole and one.status != DEAD]
    said = [f"goes on with fewer: {'; '.join(one.ranks_text for one in smaller)}"] if smaller else []
    said += filter(None, [given_up_text(state)])
    return [*lines, "✕ dead  + joins  s shadow  – waits  ? not measured", *map(printable, said), ""]


def _cell(place: MapPlace | None, width: int, colours: bool) -> str:
    if place is None:
        return " " * width
    text = cell_text(place, dense=width < 5) or ("?" if place.slowness is None else "·")
    if width < 5 and place.status == TRAINS and place.slowness is not None and len(text) > 1:
        text = str(min(9, int((place.slowness - 1) * 10))) if width < 3 else factor_text(place.slowness)[:3]
    text = text[:width]
    if not colours:
        return f"{text:^{width}}"
    # The last column of a cell stays free where there is room, so that cells can be told apart.
    gap = 1 if width > 1 else 0
    if place.status == TRAINS and place.slowness is not None:
        colour = _HEAT[heat(place.slowness)]
    else:
        colour = _STATUS[place.status]
    return f"\x1b[48;5;{colour}m\x1b[38;5;255m{text[: width - gap]:^{width - gap}}\x1b[0m" + " " * gap


def _survives(state: Live) -> list[str]:
    rows = margin_rows(state)
    if not rows:
        return []
    more = f"… and {len(rows) - _MARGINS} more, which survive as much or more" if len(rows) > _MARGINS else ""
    header = ("layers", "copies", "more losses survived", "of nodes")
    return [text_table(header, rows[:_MARGINS]), *filter(None, [more]), ""]


def _goodput(state: Live) -> list[str]:
    rows = goodput_rows(state)
    if not rows:
        return []
    return [text_table(("lost to", "cause", "time", "tokens"), rows), ""]


def _stalls(state: Live) -> list[str]:
    if not state.stalls:
        return []
    rows = [
        (
            str(one.step + 1) if one.step >= 0 else "–",
            "failure" if one.is_failure else "change",
            one.cause[:48],
            ",".join(map(str, one.ranks[:8])) + ("…" if len(one.ranks) > 8 else "") or "–",
            one.policy,
            one.outcome,
            milliseconds(one.stall_s),
        )
        for one in state.stalls[-_STALLS:]
    ]
    more = f" (the last {_STALLS} of {len(state.stalls)})" if len(state.stalls) > _STALLS else ""
    header = ("iteration", "stall", "cause", "ranks", "policy", "outcome", "ms")
    return [f"stalls{more}", text_table(header, rows), ""]


def _decision(state: Live, width: int) -> list[str]:
    decided = state.decision
    if decided is None:
        return []
    rows = [
        (
            "*" if row.get("chosen") else " ",
            str(row.get("name", "")),
            milliseconds(row.get("step_s")),
            milliseconds(row.get("transition_s")),
            "–" if row.get("score") is None else f"{row['score']:,.0f}",
            str(row.get("reason", ""))[: max(20, width - 56)],
        )
        for row in decided.candidates[:_CANDIDATES]
    ]
    more = len(decided.candidates) - len(rows)
    title = f"last decision, generation {decided.generation}: {decided.why}"
    return [
        printable(title[:width]),
        text_table(("", "candidate", "step ms", "transition ms", "tokens", "why"), rows),
        *([f"… and {more} more"] if more else []),
        "",
    ]


def _findings(state: Live) -> list[str]:
    lines = [printable(state.not_saved)] if state.not_saved else []
    lines += [
        printable(f"{one.kind}{f' {list(one.ranks)}' if one.ranks else ''}: {one.why}")
        for one in state.findings
    ]
    for suspect in state.suspects:
        what = "exclude" if suspect.is_to_exclude else "watch"
        lines.append(printable(f"{what} {suspect.node}: {'; '.join(suspect.evidence)}"))
    if names := excluded(state):
        lines.append(f"for Slurm: --exclude={names}")
    return lines
