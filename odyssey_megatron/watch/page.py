"""The page that follows a job: one document, and the part of it that changes. Nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from odyssey_megatron.metrics import map as pieces
from odyssey_megatron.metrics.live import Live
from odyssey_megatron.metrics.page import STYLE, candidates_table, fact_row
from odyssey_megatron.metrics.run import milliseconds

_SCRIPT = """
const main = document.querySelector("main");
async function look() {
  try {
    const answer = await fetch("part", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
    main.replaceChildren(...parsed.body.childNodes);
    document.body.classList.remove("gone");
  } catch (error) { document.body.classList.add("gone"); }
  setTimeout(look, document.hidden ? 10000 : 1000);
}
setTimeout(look, 1000);
"""
"""Fetches the part that changes. It is parsed as a document of its own, in which no script runs; all text in
it was escaped where it was made.
"""
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_STYLE = (
    STYLE
    + pieces.MAP_STYLE
    + """
body { max-width: 112rem; padding: 1.2rem 1.4rem 3rem; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .3rem 1rem; }
.pill { padding: .1rem .6rem; border-radius: 1rem; font-size: .8rem; font-weight: 600; background: var(--tint); }
.pill.recovering { background: var(--bad); color: #fff; }
.columns { columns: 2 34rem; column-gap: 1.2rem; } .columns section { break-inside: avoid; }
.columns section:first-child { margin-top: 0; } .columns { margin-top: .9rem; }
.facts { margin-top: .8rem; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; }
.facts > div { padding: .5rem .8rem; } .facts b { font-size: 1.15rem; }
section { padding: .9rem 1.1rem; margin-top: .9rem; }
#gone { display: none; } .gone #gone { display: block; } .gone main { opacity: .55; }
"""
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{_SCRIPT_HASH}'; style-src 'sha256-{_STYLE_HASH}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The header Content-Security-Policy: no script runs but the one above."""


def document(state: Live) -> str:
    """Return the whole page."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>odyssey: {escape(state.name)}</title><style>{_STYLE}</style><body>"
        '<p id="gone" class="bad">No answer: the job has ended, or this machine cannot reach it. Below is what it was '
        f"last.</p><main>{part(state)}</main><script>{_SCRIPT}</script></body></html>\n"
    )


def part(state: Live) -> str:
    """Return the part of the page that changes."""
    status = "recovering" if state.status == "recovering" else ""
    over = f" · {escape(state.verdict)}" if state.verdict else ""
    return (
        f'<header><h1>{escape(state.name)}</h1><span class="pill {status}">{escape(state.status)}</span>'
        f'<span class="muted">job {escape(state.job)} · generation {state.standing.generation}{over}</span></header>'
        + _facts(state)
        + _section("Missing checkpoint", pieces.not_saved(state))
        + _section("Stages × replicas", pieces.heat_map(state))
        + _section("Step time", pieces.step_bars(state))
        + '<div class="columns">'
        + _section("What makes steps longer", _findings(state))
        + _section("Nodes to exclude", pieces.suspect_list(state))
        + _section("More losses that each layer survives", pieces.margin_table(state))
        + _section("Where the time went", pieces.goodput_table(state))
        + _section("Stalls", _stalls(state))
        + _section("Last decision", _decision(state))
        + _section("Fitted costs of a microbatch", pieces.cost_table(state))
        + "</div>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _facts(state: Live) -> str:
    last, here = state.steps[-1] if state.steps else None, state.standing
    dead = len(here.dead)
    facts = [
        (f"{last.step:,}" if last else "–", "step", ""),
        (f"{last.loss:.5g}" if last else "–", "loss", ""),
        (_seconds(state.step_s), f"step; ideal {_seconds(state.goodput.ideal_step_s)}", ""),
        (f"{state.tokens_per_s:,.0f}" if state.tokens_per_s else "–", "tokens a second", ""),
        ("–" if state.goodput.share is None else f"{state.goodput.share:.2%}", "goodput", ""),
        (f"{state.living} / {state.world_size}", f"ranks live, {dead} dead", "bad" if dead else "good"),
        (
            "–" if here.survives is None else str(max(here.survives, 0)),
            "more workers may be lost",
            "bad" if here.survives is not None and here.survives < 1 else "good",
        ),
        (
            "–" if here.survives_nodes is None else str(max(here.survives_nodes, 0)),
            "more nodes may be lost",
            "",
        ),
    ]
    return fact_row(facts)


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"


def _stalls(state: Live) -> str:
    if not state.stalls:
        return '<p class="muted">None.</p>'
    rows = (
        (
            str(one.step + 1) if one.step >= 0 else "–",
            *map(escape, (one.cause, ", ".join(map(str, one.ranks)), one.policy, one.outcome)),
            milliseconds(one.stall_s),
        )
        for one in reversed(state.stalls[-20:])
    )
    texts = ((one, "") for one in ("cause", "ranks", "policy", "outcome"))
    return pieces.table((("iteration", "n"), *texts, ("stall (ms)", "n")), rows)


def _decision(state: Live) -> str:
    decided = state.decision
    if decided is None:
        return '<p class="muted">None weighed yet.</p>'
    return (
        f'<p class="muted">Generation {decided.generation}: {escape(decided.why)}. Chosen: '
        f"{escape(decided.policy)}.</p>{candidates_table(decided.candidates)}"
    )


def _findings(state: Live) -> str:
    if not state.findings:
        return '<p class="muted">Nothing was found.</p>'
    rows = (
        (
            escape(one.kind),
            escape(", ".join(map(str, one.ranks)) or "–"),
            f"{one.factor:.2f}",
            escape(one.why),
        )
        for one in state.findings
    )
    return pieces.table((("what", ""), ("ranks", ""), ("times", "n"), ("evidence", "")), rows)
