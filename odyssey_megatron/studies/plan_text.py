"""What ``odyssey plan`` prints; ``plan_page.py`` has its lines, too."""

from __future__ import annotations

import json

from odyssey_megatron.codec import to_json
from odyssey_megatron.metrics.run import text_table
from odyssey_megatron.names import about_size_text
from odyssey_megatron.plan.checking.render import render
from odyssey_megatron.plan.placing.spread import on_one_node
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.scheduling.gathers import ending_s
from odyssey_megatron.plan.scheduling.reductions import buckets
from odyssey_megatron.policy.table import candidates_table
from odyssey_megatron.policy.two_speed import TwoSpeed
from odyssey_megatron.studies.answer import WhatIf
from odyssey_megatron.studies.losses import NextLoss, alone
from odyssey_megatron.studies.scenario import Scenario
from odyssey_megatron.studies.suggested import WORTH, names_of

_SHOWN_LOSSES = 6
_SHORT = 0.1
"""The share of a step from which on it is said that it is longer for want of memory."""


def as_json(answer: WhatIf) -> str:
    """Return the answer as one JSON object."""
    decision = answer.decision
    candidates = ",".join(to_json(row) for row in (decision.candidates if decision else answer.start))
    losses = ",".join(to_json(one) for one in answer.losses)
    bound_s = decision.bound_s if decision else answer.plan.bound_s
    found = {
        "ends": json.dumps(answer.ends or None),
        "notes": json.dumps(answer.scenario.notes),
        "before": to_json(answer.before),
        "best": to_json(answer.best),
        "candidates": f"[{candidates}]",
        "decide_s": f"{answer.decide_s:.6f}",
        "cluster_bound_s": repr(bound_s),
        "next_losses": f"[{losses}]",
        "leaner": json.dumps(answer.leaner),
        "flags": json.dumps(answer.flags),
        "smaller": answer.smaller.as_json() if answer.smaller else "null",
        "after": "null" if answer.ends else to_json(answer.plan),
        "communicators": to_json(answer.communicators(answer.plan)),
    }
    return "{" + ",".join(f'"{name}":{value}' for name, value in found.items()) + "}\n"


def as_text(answer: WhatIf, width: int) -> str:
    """Return the answer for a terminal; schedules are ``width`` columns wide, and left out if that is 0."""
    scenario, before = answer.scenario, answer.before
    lines = [
        f"{scenario.name}, cluster {nodes_and_gpus(scenario)}, {scenario}",
        *(f"note: {one}" for one in scenario.notes),
        "",
        summary("before", before, scenario),
        communicators_text(answer, before),
        *([candidates_table(answer.start)] if answer.start else []),
        *filter(None, [memory_text(answer)]),
        best_layout(answer),
        *_grid(answer, before, width),
        "",
        answer.struck + (f"; decided in {answer.decide_s * 1e3:.1f} ms" if answer.decision else ""),
    ]
    if answer.decision:
        after = answer.plan
        lines += [
            candidates_table(answer.decision.candidates),
            "",
            summary("after", after, scenario),
            communicators_text(answer, after),
            bound_text(after, answer.decision.bound_s),
            *_grid(answer, after, width),
            *([two_speed_text(answer.both)] if answer.both else []),
            "",
            kept_text(answer, after),
            *_smaller_lines(answer, width),
        ]
    lines += [leaner_text(answer)] if len(answer.leaner) > 1 else []
    lines += ["", *([ends_text(answer)] if answer.ends else _losses_text(answer)), "", "flags for this job:"]
    lines += [f"  {flag:<28} {why}" for flag, why in answer.flags]
    return "\n".join(lines) + "\n"


def nodes_and_gpus(scenario: Scenario) -> str:
    """Return the cluster's size in the form of ``--cluster``."""
    return f"{len(scenario.state.ranks) // scenario.gpus_per_node}x{scenario.gpus_per_node}"


def summary(name: str, plan: Plan, scenario: Scenario) -> str:
    """Return a line on a plan."""
    fullest, costs = max(size for _, size in plan.peak_bytes), scenario.profile.costs
    end_s = ending_s(plan.layout, buckets(plan.layout, costs), costs)
    return (
        f"{name}: {plan.policy}, step {plan.step_s * 1e3:.1f} ms ({max(0.0, plan.step_s / plan.bound_s - 1):.1%} above "
        f"its layout's bound; {end_s * 1e3:.1f} ms of it until all have stepped their optimizers), "
        f"{scenario.job.tokens_per_step / plan.step_s:,.0f} tokens/s, fullest GPU {about_size_text(fullest)}"
    )


def communicators_text(answer: WhatIf, plan: Plan) -> str:
    """Return a line on the number of a plan's communicators, and the time that they are expected to take."""
    found = answer.communicators(plan)
    return f"{found.held}; {'at the start' if plan is answer.before else 'at least'} {found.connected}"


def memory_text(answer: WhatIf) -> str:
    """Return a line on what the want of memory costs the healthy job; empty if that is little."""
    if answer.short_of_memory < _SHORT:
        return ""
    slices = "" if answer.scenario.job.optimizer_copies else ", --use-distributed-optimizer"
    return (
        f"for want of memory a step of this layout is {answer.short_of_memory:.0%} longer at least; more "
        f"stages{slices}, recomputation, or a smaller --odyssey-memory-headroom-percent make room"
    )


def best_layout(answer: WhatIf) -> str:
    """Return a line on the best layout of the healthy job."""
    before, best = answer.before, answer.best
    # As policy/initial.py looks for it: among others only if none of these fits.
    restricted = not alone(before.layout) and not alone(best.layout)
    among = "of layouts that survive the loss of any one worker, " if restricted else ""
    if best.layout == before.layout:
        return f"{among}no layout that was found is faster without failures"
    return (
        f"{among}pipelines {best.layout.lengths} have a step of {best.step_s * 1e3:.1f} ms without failures, "
        f"{before.step_s / best.step_s - 1:.1%} more throughput: --odyssey-layout auto"
    )


def bound_text(after: Plan, bound_s: float) -> str:
    """Return a line on how much shorter a step of any layout could be."""
    return (
        f"no layout over the living workers can have a step below {bound_s * 1e3:.1f} ms, "
        f"{1 - bound_s / after.step_s:.1%} less"
    )


def kept_text(answer: WhatIf, after: Plan) -> str:
    """Return a line on the throughput that is left."""
    before, best = answer.before, answer.best
    kept = f"throughput after / before: {before.step_s / after.step_s:.1%}"
    if before.step_s / best.step_s - 1 < WORTH:
        return kept
    # Otherwise a loss can look like a gain: what follows it is planned anew, and what was before is the launch line's.
    return f"{kept}; of the best layout without failures {best.step_s / after.step_s:.1%}"


def smaller_text(answer: WhatIf) -> str:
    """Return a line on what becomes of cells that have lost GPUs; empty if none has."""
    found, size = answer.smaller, answer.scenario.job.cell_size
    if found is None:
        return ""
    if not found.sizes:
        return f"what is left of broken cells stands by: {found.why or 'too few ranks are left'}"
    cells = "; ".join(f"worker {worker} with {left} of {size} GPUs" for worker, left in found.sizes.items())
    gain = answer.gain_of_smaller
    worth = f"{gain:+.1%} throughput" if gain else "which gains nothing: they wait among the living"
    given_up = "once lost GPUs are given up, " if answer.scenario.config.respawn else ""
    rest = f"; all others stand by: {found.why}" if found.why else ""
    return f"{given_up}what is left of broken cells goes on ({cells}), {worth}{rest}"


def _smaller_lines(answer: WhatIf, width: int) -> list[str]:
    text, plan = smaller_text(answer), answer.smaller and answer.smaller.plan
    if not plan:
        return [text] if text else []
    return [text, summary("then", plan, answer.scenario), *_grid(answer, plan, width)]


def leaner_text(answer: WhatIf) -> str:
    """Return a line on what less memory would cost."""
    found = answer.leaner
    steps = (
        f"{share * 100:g}: {step_s * 1e3:.1f} ms, {about_size_text(size)}" for share, step_s, size in found
    )
    return f"memory for speed, by --odyssey-slower-for-memory-percent: {'; '.join(steps)}"


def two_speed_text(both: TwoSpeed) -> str:
    """Return a line on what moving layers behind the steps would gain."""
    gain = both.tokens / both.direct_tokens - 1 if both.direct_tokens > 0 else 0.0
    return (
        f"two-speed: {both.now.policy} at once, {len(both.then.transfers)} layers move behind "
        f"{both.after_steps} step(s), then {both.then.policy}: {gain:+.2%} tokens beside moving first"
    )


def ends_text(answer: WhatIf) -> str:
    """That the job would end, in a sentence or more."""
    return f"the job ends, exit code {answer.exit_code}: {answer.ends}"


LOSS_COLUMNS = ("the next loss", "with", "then", "step", "throughput", "without a second holder then")


def loss_rows(answer: WhatIf) -> list[tuple[str, ...]]:
    """Return the table of next losses, the worst first; losses with the same outcome share a row."""
    rows: dict[tuple[str, ...], list[NextLoss]] = {}
    plan, _ = answer.lasting
    for one in answer.losses:
        ends: tuple[str, ...] = ("the job ends", "–", "–", "–")
        if one.step_s is not None:
            step, kept = f"{one.step_s * 1e3:.1f} ms", f"{plan.step_s / one.step_s:.1%}"
            ends = (one.policy, step, kept, names_of(one.alone, plan))
        rows.setdefault(ends, []).append(one)
    found: list[tuple[str, ...]] = []
    for ends, alike in rows.items():
        workers = [worker for one in alike for worker in one.workers]
        layers = {layer for one in alike for span in one.spans for layer in range(*span)}
        who = f"worker {workers[0]}" if len(workers) == 1 else f"any of {len(workers)} workers"
        found.append((who, names_of(sorted(layers), plan), *ends))
    return found


def _losses_text(answer: WhatIf) -> list[str]:
    rows = loss_rows(answer)
    lines = [text_table(LOSS_COLUMNS, rows[:_SHOWN_LOSSES])]
    if len(rows) > _SHOWN_LOSSES:
        lines.append("all others cost less")
    return [*lines, *filter(None, [gain_text(answer)]), nodes_text(answer)]


def gain_text(answer: WhatIf) -> str:
    """Return a line on why throughput is larger after some next loss; empty if it is not."""
    plan, _ = answer.lasting
    if not any(one.step_s and plan.step_s / one.step_s - 1 >= WORTH for one in answer.losses):
        return ""
    may = ", and may give up second holders" if any(one.alone for one in answer.losses) else ""
    return f"more than 100%: what follows a loss is planned anew{may}"


def nodes_text(answer: WhatIf) -> str:
    """Return a line on what the loss of a whole node would do."""
    plan, state = answer.lasting
    fatal = on_one_node(plan.layout, state.nodes)
    if len({*state.nodes.values()}) == 1:
        return "a whole node: there is only one"
    if not fatal:
        return "a whole node: no layer has all its holders on one"
    node, layers = min(fatal.items())
    names = names_of(layers, plan)
    return (
        f"a whole node: {len(fatal)} of them cannot be lost, since all holders of a layer are there (node {node}: "
        f"{names})"
    )


def _grid(answer: WhatIf, plan: Plan, width: int) -> list[str]:
    return [render(plan.schedule, answer.timeline(plan), width=width)] if width > 0 else []
