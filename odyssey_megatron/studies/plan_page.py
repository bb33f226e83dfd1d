"""The answer of ``odyssey plan`` as a page of its own: one file, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from odyssey_megatron.codec import to_jsonable
from odyssey_megatron.metrics import map as pieces
from odyssey_megatron.metrics.page import (
    candidates_table,
    document,
    fact_row,
    figure,
    section,
    sentence,
    table,
)
from odyssey_megatron.metrics.traces import planned_step
from odyssey_megatron.names import about_size_text
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.studies import plan_text
from odyssey_megatron.studies.answer import WhatIf
from odyssey_megatron.studies.scenario import Scenario

_STEPS_OF_HEAT = 5
_MOST_BOXES = 60_000
"""The most instructions that are drawn: a picture of more takes minutes, and nobody could read it."""


def html(answer: WhatIf) -> str:
    """Return the whole page."""
    scenario, decision = answer.scenario, answer.decision
    shown = [("before", answer.before)] + ([("after", answer.plan)] if decision else [])
    if answer.smaller and answer.smaller.plan:
        shown.append(("with what is left of cells", answer.smaller.plan))
    parts = [
        f"<h1>{escape(scenario.name)}</h1>",
        f'<p class="muted">{escape(plan_text.nodes_and_gpus(scenario))} GPUs · {scenario} · '
        f"{escape(answer.struck)}</p>",
        _facts(answer),
        *(
            section(
                f"Layout {name}",
                "A row is a pipeline, a box one of its workers: its layers there (E embedding, H head), and what it "
                "keeps at most, for all pipelines that it is in; the warmer, the fuller.",
                _layout(plan, scenario, answer.sizes(plan)),
            )
            for name, plan in shown
        ),
        section(
            "Without failures",
            "",
            "".join(
                f"<p>{escape(sentence(one))}</p>"
                for one in (plan_text.memory_text(answer), plan_text.best_layout(answer))
                if one
            ),
        ),
        *_weighed("What was weighed for the start", answer.start),
        *_weighed("What was weighed", decision.candidates if decision else ()),
        _schedules(answer, shown),
        _next(answer),
        section("Flags for this job", "", table(("flag", "why"), answer.flags)),
        section(
            "What this rests on",
            "",
            "".join(
                f"<p>{escape(sentence(note))}</p>"
                for note in (
                    *_of_decision(answer),
                    *filter(None, [plan_text.smaller_text(answer)]),
                    plan_text.communicators_text(answer, answer.plan),
                    *([plan_text.leaner_text(answer)] if len(answer.leaner) > 1 else ()),
                    *scenario.notes,
                )
            ),
        ),
    ]
    return document(f"odyssey plan: {scenario.name}", parts)


def _weighed(title: str, candidates: Sequence[CandidateRow]) -> Iterator[str]:
    if candidates:
        yield section(title, "", candidates_table([to_jsonable(row) for row in candidates]))


def _of_decision(answer: WhatIf) -> Iterator[str]:
    """Yield sentences on the plan after what has happened."""
    if answer.decision:
        yield plan_text.kept_text(answer, answer.plan)
        yield plan_text.bound_text(answer.plan, answer.decision.bound_s)
    if answer.both:
        yield plan_text.two_speed_text(answer.both)


def _next(answer: WhatIf) -> str:
    """What the next loss would do, or that this one ends the job."""
    if answer.ends:
        return section("The job ends", "", f"<p>{escape(sentence(plan_text.ends_text(answer)))}</p>")
    return section(
        "The next loss",
        " ".join(map(sentence, filter(None, (plan_text.gain_text(answer), plan_text.nodes_text(answer))))),
        table(plan_text.LOSS_COLUMNS, plan_text.loss_rows(answer)),
    )


def _facts(answer: WhatIf) -> str:
    before, (after, _), tokens = answer.before, answer.lasting, answer.scenario.job.tokens_per_step
    facts = [
        (f"{before.step_s:.3g} s", "a step", ""),
        (f"{tokens / before.step_s:,.0f}", "tokens a second", ""),
        (about_size_text(max(size for _, size in before.peak_bytes)), "the fullest GPU", ""),
    ]
    if answer.decision:
        share = before.step_s / after.step_s
        with_rest = "" if after is answer.plan else ", with what is left of cells"
        facts += [
            (f"{after.step_s:.3g} s", f"a step behind it: {after.policy}", ""),
            (f"{share:.1%}", f"of the throughput stays{with_rest}", "good" if share >= 0.9 else "bad"),
        ]
    if answer.ends:
        return fact_row([*facts, ("ends", "the job, with this loss", "bad")])
    ends = sum(len(one.workers) for one in answer.losses if one.step_s is None)
    alone = sum(len(one.workers) for one in answer.losses if one.alone)
    survives = ("ends the job", "bad") if ends else ("survived", "" if alone else "good")
    of = f" of any of {ends} workers" if ends else ""
    then = f"; that of any of {alone} workers leaves layers without a second holder" if alone else ""
    facts.append((survives[0], f"the next loss{of}{then}", survives[1]))
    return fact_row(facts)


def _layout(plan: Plan, scenario: Scenario, sizes: Mapping[int, int]) -> str:
    """Return a table of the plan's pipelines: the routes of microbatches, each with the number of microbatches that
    take it. ``sizes``: the number of GPUs of workers that have lost some.
    """
    peaks, lanes = dict(plan.peak_bytes), scenario.job.cell(0).lanes
    most = scenario.profile.costs.memory_bytes or max(peaks.values())
    ways: dict[tuple[tuple[int, int, int], ...], int] = {}
    for route in plan.layout.routes:
        way = tuple((hop.worker, hop.first, hop.last) for hop in route.hops)
        ways[way] = ways.get(way, 0) + len(route.microbatches) * lanes
    rows = []
    for way, count in sorted(ways.items()):
        spans: dict[int, list[str]] = {}
        for worker, first, last in way:  # where routes turn, a worker has several
            spans.setdefault(worker, []).append(pieces.short_span(first, last, plan.layout.num_layers))
        cells = "".join(
            f'<td class="h{int(peaks[worker] / most * _STEPS_OF_HEAT)}">worker {worker}<br>'
            f"{escape(', '.join(layers))}<br>{about_size_text(peaks[worker])}"
            f"{f'<br>{sizes[worker]} GPUs' if worker in sizes else ''}</td>"
            for worker, layers in spans.items()
        )
        rows.append(f"<tr><th>{count} microbatches</th>{cells}</tr>")
    return f'<table class="map">{"".join(rows)}</table>'


def _schedules(answer: WhatIf, shown: Sequence[tuple[str, Plan]]) -> str:
    # Imported here, so that plans can be made, and printed, without matplotlib.
    from odyssey_megatron.metrics.plots import schedule_picture

    drawn = [
        (name, planned_step(plan.schedule, answer.timeline(plan)), answer.dead(plan)) for name, plan in shown
    ]
    count = sum(len(one.boxes) for _, one, _ in drawn)
    if count > _MOST_BOXES:
        return section("Schedule", "", f"<p>{count:,} instructions are too many for a picture.</p>")
    return figure(
        schedule_picture(
            "Schedule",
            "As simulated. One row a worker, numbers are microbatches.",
            drawn,
        )
    )
