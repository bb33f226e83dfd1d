"""The report's HTML page: one file, nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from odyssey_megatron.metrics import map as pieces
from odyssey_megatron.metrics.recoveries import DecisionRecord, median
from odyssey_megatron.metrics.run import (
    RECOVERY_COLUMNS,
    SWITCH_COLUMNS,
    Run,
    clocks_line,
    difference_line,
    milliseconds,
    recovery_cells,
    samples_line,
    switch_cells,
)
from odyssey_megatron.metrics.steps import loss_difference

if TYPE_CHECKING:
    from odyssey_megatron.metrics.plots import Picture

STYLE = """
:root { color-scheme: light dark;
  --page: light-dark(#f5f6f8, #0e1116); --card: light-dark(#ffffff, #161b22); --ink: light-dark(#1b2330, #e6e9ee);
  --muted: light-dark(#667085, #98a2b3); --line: light-dark(#e4e7ec, #2b323d);
  --bar: light-dark(#7fa3d8, #4f7fc4);
  --good: light-dark(#17754a, #5fd29b); --bad: light-dark(#c8322b, #ff6b61); --tint: light-dark(#eef4ff, #1b2a44); }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 1.1rem; margin: 0 0 .2rem; }
h3 { font-size: .95rem; margin: 1.4rem 0 .3rem; }
p { margin: .2rem 0 .8rem; } .muted { color: var(--muted); }
section, .facts > div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
section { padding: 1.2rem 1.4rem; margin-top: 1.2rem; overflow-x: auto; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; margin-top: 1.4rem; }
.facts > div { padding: .8rem 1rem; }
.facts b { display: block; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.facts span { color: var(--muted); font-size: .85rem; }
.good b, .good { color: var(--good); } .bad b, .bad { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--muted); }
th, td { padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } td.n, th.n { text-align: right; white-space: nowrap; }
td.total { font-weight: 650; } tr.chosen td { background: var(--tint); font-weight: 600; }
code { font: .92em ui-monospace, monospace; }
img { width: 100%; height: auto; display: block; }
"""


def html(run: Run, reference: Run | None, pictures: Sequence[Picture]) -> str:
    """Return the whole page."""
    named = {picture.name: picture for picture in pictures}
    schedules = [picture for picture in pictures if picture.name.startswith("schedule_")]
    parts = [
        f"<h1>{escape(run.name)}</h1>",
        f'<p class="muted">{len(run.steps)} steps on {escape(str(run.world_size))} ranks · {escape(run.verdict)}</p>',
        _facts(run, reference),
        _recoveries(run),
        _switches(run),
        section("Missing checkpoint", "", missing) if (missing := pieces.not_saved(run.state)) else "",
        section("Stages × replicas", "As it was at the end.", pieces.heat_map(run.state)),
        section("Where the time went", "", pieces.goodput_table(run.state)),
        figure(named["loss"], _difference(run, reference)),
        figure(named["step_time"]),
        *(figure(picture) for picture in schedules),
        _decisions(run),
        section(
            "Fitted costs",
            "Of one microbatch, on a healthy worker: what was measured last.",
            pieces.cost_table(run.state),
        ),
        section("More losses that each layer survives", "At the end.", pieces.margin_table(run.state)),
        section("Nodes to exclude", "", pieces.suspect_list(run.state)),
        _samples(run),
        _not_struck(run),
    ]
    return document(f"odyssey: {run.name}", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page made of ``parts``, of which empty ones are left out."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{pieces.MAP_STYLE}</style><body>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def section(title: str, caption: str, body: str) -> str:
    """Return a section; ``body`` is HTML already."""
    said = f'<p class="muted">{escape(caption)}</p>' if caption else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>"


def _facts(run: Run, reference: Run | None) -> str:
    stalls = [row.stall_s for row in run.recoveries if row.stall_s is not None]
    lost = sum(len(row.dead) for row in run.recoveries) or len(run.state.standing.dead)
    facts = [
        (str(lost), f"rank(s) lost, {len(run.recoveries)} time(s) recovered", ""),
        (_ms(median(stalls)), "median stall", ""),
        (_ms(max(stalls, default=None)), "longest stall", ""),
        (f"{run.steps[-1].loss:.4f}", "final loss", ""),
    ]
    if reference:
        difference = loss_difference(run.steps, reference.steps)
        facts.append((f"{difference.max_relative:.2g}", "largest relative loss difference", ""))
    proof = ("exactly once", "good") if run.samples.ok else ("not proven", "bad")
    facts.append((proof[0], f"{run.samples.samples} samples consumed", proof[1]))
    return fact_row(facts)


def fact_row(facts: Iterable[tuple[str, str, str]]) -> str:
    """Return a row of facts, each of (value, label, class)."""
    cells = (
        f'<div class="{kind}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label, kind in facts
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _ms(value_s: float | None) -> str:
    return "–" if value_s is None else f"{milliseconds(value_s)} ms"


def _recoveries(run: Run) -> str:
    if not run.recoveries:
        return f"<section><h2>Recoveries</h2><p>None: {escape(run.without_recovery)}.</p></section>"
    rows = [recovery_cells(number, row) for number, row in enumerate(run.recoveries, 1)]
    return (
        '<section><h2>Recoveries</h2><p class="muted">Durations in milliseconds, of the slowest surviving rank. '
        "Stall: from the failure to the first instruction that ran after it. Redo: the interrupted step, run "
        f"again until it was committed. {sentence(clocks_line(run))}</p>"
        f"{table(RECOVERY_COLUMNS, rows)}</section>"
    )


def _switches(run: Run) -> str:
    if not run.switches:
        return ""
    rows = [switch_cells(row) for row in run.switches]
    return (
        '<section><h2>Changes between two steps</h2><p class="muted">Nothing was interrupted: groups were made and '
        "state was sent while training went on. Stall in milliseconds, of the slowest rank that trained.</p>"
        f"{table(SWITCH_COLUMNS, rows)}</section>"
    )


_NUMBERS = {
    "#",
    "iteration",
    *RECOVERY_COLUMNS[7:],
    "step (ms)",
    "transition (ms)",
    "score (tokens)",
    "next loss",
}
"""Columns that are aligned to the right."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], chosen: int | None = None) -> str:
    """Return a table of text, in which row number ``chosen`` stands out."""
    lines = [_row(columns, cells, chosen=at == chosen) for at, cells in enumerate(rows)]
    return f"<table>{_header(columns)}{''.join(lines)}</table>"


def _header(columns: Sequence[str]) -> str:
    cells = (f'<th class="{_column_class(column)}">{escape(column)}</th>' for column in columns)
    return f"<tr>{''.join(cells)}</tr>"


def _row(columns: Sequence[str], cells: Sequence[str], *, chosen: bool = False) -> str:
    body = (
        f'<td class="{_column_class(column)}">{escape(cell)}</td>'
        for column, cell in zip(columns, cells, strict=True)
    )
    return f'<tr class="{"chosen" if chosen else ""}">{"".join(body)}</tr>'


def _column_class(column: str) -> str:
    return ("n" if column in _NUMBERS else "") + (" total" if column == "stall" else "")


def _difference(run: Run, reference: Run | None) -> str:
    if reference is None:
        return ""
    return f"<p>{escape(sentence(difference_line(loss_difference(run.steps, reference.steps))))}</p>"


def _samples(run: Run) -> str:
    kind = "good" if run.samples.ok else "bad"
    return (
        f'<section><h2>Samples</h2><p class="{kind}">{escape(sentence(samples_line(run.samples)))}</p>'
        '<p class="muted">Checked on what the committed attempt of each step consumed, in order of step and '
        "microbatch.</p></section>"
    )


def _not_struck(run: Run) -> str:
    if not run.not_struck:
        return ""
    told = escape(sentence(run.not_struck_line))
    return f'<section><h2>Faults that did not strike</h2><p class="bad">{told}</p></section>'


def sentence(line: str) -> str:
    """Return ``line`` with a capital letter and a full stop."""
    return line[:1].upper() + line[1:] + "." * (line[-1:] not in ("", "."))


def _decisions(run: Run) -> str:
    numbers = {row.generation: number for number, row in enumerate(run.recoveries, 1)}
    tables = [_decision(numbers[one.generation], one) for one in run.decisions if one.generation in numbers]
    if not tables:
        return ""
    return (
        '<section><h2>Decisions</h2><p class="muted">Every candidate that was weighed after each failure. '
        "Score: tokens expected until the horizon, transition included.</p>" + "".join(tables) + "</section>"
    )


def _decision(number: int, decision: DecisionRecord) -> str:
    why = f" · {escape(decision.why)}" if decision.why else ""
    return (
        f"<h3>Failure {number}: {escape(decision.policy)} <code>{escape(decision.plan_hash)}</code>{why}</h3>"
        + candidates_table(decision.candidates)
    )


def candidates_table(candidates: Sequence[dict[str, Any]]) -> str:
    """Return a table of all candidates that were weighed."""
    columns = ("candidate", "step (ms)", "transition (ms)", "score (tokens)", "next loss", "why")
    chosen = next((at for at, row in enumerate(candidates) if row.get("chosen")), None)
    return table(columns, map(_candidate, candidates), chosen)


def _candidate(row: dict[str, Any]) -> tuple[str, ...]:
    score, next_loss = row.get("score"), row.get("next_loss")
    return (
        str(row.get("name", "")),
        milliseconds(row.get("step_s")),
        milliseconds(row.get("transition_s")),
        "–" if score is None else f"{score:,.0f}",
        f"-{next_loss:,.0f}" if next_loss else "",
        str(row.get("reason", "")),
    )


def figure(picture: Picture, more: str = "") -> str:
    """Return a picture in both themes; ``more`` is HTML."""
    light, dark = (base64.b64encode(data).decode() for data in (picture.light, picture.dark))
    return (
        f'<section><h2>{escape(picture.title)}</h2><p class="muted">{escape(picture.caption)}</p>{more}<picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{escape(picture.title)}" src="data:image/png;base64,{light}"></picture></section>'
    )
