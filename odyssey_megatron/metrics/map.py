"""Parts of a page that show the state of a job, for the live page and for the report. All text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from odyssey_megatron.metrics.goodput import BUCKETS
from odyssey_megatron.metrics.live import Cost, Live
from odyssey_megatron.metrics.standing import DEAD, JOINS, SHADOW, TRAINS, WAITS, MapPlace, Span
from odyssey_megatron.names import layer_names

MAP_STYLE = """
table.map { width: auto; border-collapse: separate; border-spacing: 2px; }
table.map th { font-weight: 400; font-size: .74rem; padding: 0 .5rem 0 0; border: 0; white-space: nowrap; }
table.map th.col { padding: 0; text-align: center; }
table.map td { border: 0; padding: 0; height: 1.45rem; min-width: 2.4rem; text-align: center; font-size: .72rem;
  border-radius: 3px; cursor: default; vertical-align: middle; }
table.dense td { min-width: 1.35rem; height: 1.25rem; font-size: .62rem; }
td.h0 { background: light-dark(#dcefe4, #17382a); } td.h1 { background: light-dark(#eef0d4, #37391d); }
td.h2 { background: light-dark(#fbe6a9, #5a4713); } td.h3 { background: light-dark(#f8c471, #7c4d10); }
td.h4 { background: light-dark(#ee8f5b, #a3441a); } td.h5 { background: light-dark(#d6453d, #d2362d); color: #fff; }
td.unknown { background: light-dark(#e8ebf0, #262d38); }
td.dead { background: light-dark(#1b2330, #05070a); color: #fff; }
td.shadow { background: light-dark(#dfe4fb, #232a4d); } td.joins { background: light-dark(#cfe3ff, #1d3a63); }
td.waits { background: transparent; outline: 1px dashed var(--line); }
p.legend { font-size: .78rem; color: var(--muted); }
svg { display: block; width: 100%; height: auto; }
svg .bar { fill: var(--bar); } svg .slowbar { fill: var(--bad); } svg .axis { stroke: var(--line); }
svg.meter { width: 9rem; height: .6rem; } svg.meter .back { fill: var(--line); }
"""
HEATS = (1.03, 1.06, 1.1, 1.25, 1.5)
"""The factors at which the colours get warmer."""
_DENSE = 20
"""With more columns than this, only slow workers have their number shown."""
_SHOWN_SLOW = 1.1


def heat(slowness: float) -> int:
    """Return the colour for a slowness, from 0 (as fast as others) to 5."""
    return sum(slowness > one for one in HEATS)


def factor_text(slowness: float) -> str:
    return f"{slowness:.2f}" if slowness < 9.995 else f"{slowness:.0f}"


def spans_text(spans: Sequence[Span], num_layers: int) -> str:
    layers = [layer for first, last in spans for layer in range(first, last)]
    return layer_names(layers, num_layers) if layers else "no layers"


def short_span(first: int, last: int, num_layers: int) -> str:
    """Return a stage's layers in few letters: ``E 1–4``, ``5``, ``13–16 H``. T is a weight that both ends share."""
    inner = [layer for layer in range(first, last) if 0 < layer < num_layers - 1]
    middle = (str(inner[0]) if len(inner) == 1 else f"{inner[0]}–{inner[-1]}") if inner else ""
    ends = ["E"] if first == 0 else []
    behind = (["H"] if first < num_layers <= last else []) + (["T"] if last > num_layers else [])
    return " ".join(one for one in (*ends, middle, *behind) if one)


def rows_of(state: Live) -> list[tuple[int, list[MapPlace | None]]]:
    """Return (stage, its places by replica). Stage -1, of workers without a place in the first plan, comes last."""
    places = state.standing.places
    at = {(one.stage, one.replica): one for one in places}
    stages = [*range(state.standing.stages), *([-1] if any(one.stage < 0 for one in places) else [])]
    return [
        (stage, [at.get((stage, column)) for column in range(state.standing.replicas)]) for stage in stages
    ]


def stage_spans(row: Iterable[MapPlace | None]) -> tuple[Span, ...] | None:
    """Return the layers that all training workers of a stage compute; None if they differ, or none trains."""
    found = {one.spans for one in row if one is not None and one.status == TRAINS}
    return found.pop() if len(found) == 1 else None


def layers_text(row: Iterable[MapPlace | None], num_layers: int, between: str) -> str:
    """Return what a stage computes in few letters, with ``between`` its spans."""
    row = list(row)
    if spans := stage_spans(row):
        return between.join(short_span(*span, num_layers) for span in spans)
    return "mixed" if any(one is not None and one.status == TRAINS for one in row) else "nobody"


def given_up_text(state: Live) -> str:
    """Return which GPUs are taken for broken; empty if there are none."""
    gpus = "; ".join(f"GPU {one.slot} of {one.host} (rank {one.rank})" for one in state.given_up)
    return f"given up, until odyssey readmit: {gpus}" if gpus else ""


def not_saved(state: Live) -> str:
    """Return a paragraph on the checkpoint that is missing; empty if none is."""
    return f'<p class="bad">{escape(state.not_saved)}</p>' if state.not_saved else ""


def span_seconds(costs: Iterable[Cost]) -> dict[Span, float]:
    """Return the seconds of one microbatch for each span, all kinds of work together."""
    found: dict[Span, float] = {}
    for one in costs:
        found[one.first, one.last] = found.get((one.first, one.last), 0.0) + one.seconds
    return found


def cell_text(place: MapPlace, *, dense: bool) -> str:
    """Return the text of a worker's cell: a letter if it does not train, else how slow it is."""
    if place.status != TRAINS:
        return {DEAD: "✕", JOINS: "+", SHADOW: "s", WAITS: "–"}[place.status]
    if place.slowness is None or (dense and place.slowness < _SHOWN_SLOW):
        return ""
    return factor_text(place.slowness)


def heat_map(state: Live) -> str:
    """Return the table of stages × replicas."""
    rows, seconds, total = rows_of(state), span_seconds(state.costs), state.standing.num_layers
    if not rows:
        return '<p class="muted">No plan yet.</p>'
    dense = state.standing.replicas > _DENSE
    columns = "".join(
        f'<th class="col">{column if not dense or column % 8 == 0 else ""}</th>'
        for column in range(state.standing.replicas)
    )
    lines = [f"<tr><th></th><th></th><th></th>{columns}</tr>"]
    for stage, row in rows:
        layers = layers_text(row, total, " + ")
        took = sum(seconds.get(span, 0.0) for span in stage_spans(row) or ())
        head = (f"stage {stage}", layers if stage >= 0 else "", f"{took * 1e3:.3g} ms" if took else "")
        heads = "".join(f"<th>{escape(one)}</th>" for one in (head if stage >= 0 else ("spare", "", "")))
        lines.append(f"<tr>{heads}{''.join(_cell(one, dense, total) for one in row)}</tr>")
    return (
        f'<table class="{"map dense" if dense else "map"}">{"".join(lines)}</table>'
        '<p class="legend">Columns are replicas. A number is how many times as long a worker takes as others do for '
        "the same work, by the last measured steps. ✕ dead · + joins · s shadow · – waits. Beside a stage: its layers "
        "(E embedding, H head) and what one microbatch takes there on a healthy worker.</p>"
        + (f"<p>{escape(given_up_text(state))}</p>" if state.given_up else "")
    )


def _cell(place: MapPlace | None, dense: bool, num_layers: int) -> str:
    if place is None:
        return '<td class="waits"></td>'
    if place.status == TRAINS:
        kind = "unknown" if place.slowness is None else f"h{heat(place.slowness)}"
    else:
        kind = place.status
    facts = [f"worker {place.worker}", place.ranks_text, place.node, place.status]
    if place.status == TRAINS:
        facts += [spans_text(place.spans, num_layers), f"{place.microbatches} microbatches"]
    if place.slowness is not None:
        facts.append(f"{factor_text(place.slowness)} times the time")
    title = escape(" · ".join(one for one in facts if one), quote=True)
    return f'<td class="{kind}" title="{title}">{escape(cell_text(place, dense=dense))}</td>'


def step_bars(state: Live) -> str:
    """Return a chart of step times, the newest on the right; red at failures and changes of plan."""
    shown = [row for row in state.steps if row.interval_s is not None and row.interval_s > 0]
    if not shown:
        return ""
    stalled = {one.step for one in state.stalls}
    width, height = 720, 90
    ordered = sorted(row.interval_s or 0.0 for row in shown)
    top_s = max(2.5 * ordered[len(ordered) // 2], 1e-9)
    each = width / len(shown)
    bars = []
    for number, row in enumerate(shown):
        took_s = row.interval_s or 0.0
        tall = min(1.0, took_s / top_s) * (height - 6)
        kind = "slowbar" if row.step in stalled else "bar"
        bars.append(
            f'<rect class="{kind}" x="{number * each:.2f}" y="{height - tall:.2f}" width="{max(each - 0.6, 0.4):.2f}" '
            f'height="{tall:.2f}"></rect>'
        )
    label = f"Steps {shown[0].step} to {shown[-1].step}: bars end at {top_s:.3g} s, longer ones are cut off"
    return (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" height="{height}">{"".join(bars)}</svg>'
        f'<p class="legend">{escape(label)}. Red: a failure or another plan.</p>'
    )


def goodput_rows(state: Live) -> list[tuple[str, str, str, str]]:
    """Return (bucket, cause, seconds with its share, tokens), the largest loss first."""
    total = state.goodput.elapsed_s or 1.0
    return [
        (one.bucket, one.cause, f"{one.seconds:,.2f} s · {one.seconds / total:.2%}", f"{one.tokens:,.0f}")
        for one in state.goodput.lost
    ]


def goodput_table(state: Live) -> str:
    worth = state.goodput
    if worth.share is None:
        return '<p class="muted">Nothing has been trained yet.</p>'
    rows = (
        (
            f'<code title="{escape(BUCKETS.get(bucket, ""), quote=True)}">{escape(bucket)}</code>',
            *map(escape, (cause, took, tokens)),
        )
        for bucket, cause, took, tokens in goodput_rows(state)
    )
    lost = table((("bucket", ""), ("cause", ""), ("time lost", "n"), ("tokens lost", "n")), rows)
    ideal = "" if worth.ideal_step_s is None else f", an ideal step being {worth.ideal_step_s:.4g} s"
    return (
        f'<p class="muted">Goodput {worth.share:.2%} of {worth.elapsed_s:,.1f} s{ideal}; {worth.tokens:,} tokens '
        f"trained. Lost tokens are lost time at that pace.</p>{lost}"
    )


def margin_rows(state: Live) -> list[tuple[str, str, str, str]]:
    """Return (layers, living holders, more losses survived, more nodes survived), those that survive least first."""
    alike: dict[tuple[int, int], list[int]] = {}
    for one in state.standing.margins:
        alike.setdefault((one.survives, one.survives_nodes), []).extend(range(one.first, one.last))
    return [
        (
            layer_names(layers, state.standing.num_layers),
            str(survives + 1),
            str(survives) if survives >= 0 else "lost",
            str(nodes) if nodes >= 0 else "lost",
        )
        for (survives, nodes), layers in sorted(alike.items())
    ]


def margin_table(state: Live) -> str:
    columns = (("layers", ""), ("copies", "n"), ("more losses survived", "n"), ("of nodes", "n"))
    return table(columns, (map(escape, row) for row in margin_rows(state)))


def cost_table(state: Live) -> str:
    """Return a table of the fitted costs, with a row for each span of layers."""
    kinds = list(dict.fromkeys(one.kind for one in state.costs))
    spans: dict[Span, dict[str, float]] = {}
    for one in state.costs:
        spans.setdefault((one.first, one.last), {})[one.kind] = one.seconds
    if not spans:
        return '<p class="muted">Nothing has been measured yet.</p>'
    columns = [("layers", ""), *((kind, "n") for kind in kinds), ("together", "n total")]
    rows = (
        (
            escape(layer_names(range(*span), state.standing.num_layers)),
            *(_ms(took.get(kind)) for kind in kinds),
            _ms(sum(took.values())),
        )
        for span, took in sorted(spans.items())
    )
    return table(columns, rows)


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Iterable[str]]) -> str:
    """Return a table.

    Args:
        columns: (heading, class of its cells); the class ``n`` is for numbers.
        rows: Cells in HTML.
    """
    classes = [f' class="{kind}"' if kind else "" for _, kind in columns]
    head = "".join(
        f"<th{kind}>{escape(title)}</th>" for kind, (title, _) in zip(classes, columns, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.4g} ms"


def suspect_list(state: Live) -> str:
    if not state.suspects:
        return '<p class="muted">Nothing speaks against any node.</p>'
    rows = (
        (
            f'<span class="{"bad" if one.is_to_exclude else ""}">{escape(one.node)}</span>',
            "exclude" if one.is_to_exclude else "watch",
            "<br>".join(map(escape, one.evidence)),
        )
        for one in state.suspects
    )
    exclude = excluded(state)
    flag = f"<p>For Slurm: <code>--exclude={escape(exclude)}</code></p>" if exclude else ""
    return table((("node", ""), ("", ""), ("evidence", "")), rows) + flag


def excluded(state: Live) -> str:
    """Return the nodes to exclude as Slurm's ``--exclude`` takes them. Names that Slurm cannot take are left out."""
    names = (one.node for one in state.suspects if one.is_to_exclude)
    return ",".join(one for one in names if re.fullmatch(r"[\w.-]+", one))
