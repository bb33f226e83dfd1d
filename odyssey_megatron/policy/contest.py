"""The contest of a decision's options: branch and bound, in order of the best score that each could have."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.simulate import computed_before_s, step_end_s
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.options import (
    Candidate,
    Drawn,
    LaidOut,
    Option,
    drawn,
    laid_out,
    with_replicas_apart,
)
from odyssey_megatron.policy.proposal import Proposal, Sketch
from odyssey_megatron.policy.reasons import left_over, lost_to, row_of, unscored
from odyssey_megatron.policy.shapes.pipelines import ALIKE
from odyssey_megatron.policy.shapes.shares import SLACK
from odyssey_megatron.policy.shapes.turns import TURNS

_FINALISTS = 6
"""The largest number of shapes of one policy that are scheduled in full; the others only get an estimate."""


def best_of(
    case: Case, found: Sequence[Option], policy: str, longest_s: float, known: Sequence[Candidate] = ()
) -> tuple[list[Candidate], list[CandidateRow]]:
    """Find the best option by branch and bound, in order of the best score that each could have.

    The first option in the order is drawn, and then laid out, if it is not yet, and put back each time by its new
    bound; if it comes first again, it is scheduled. The search ends when no option left can win. An option of the
    policy asked for comes before all others, and if one can be had, no other is scheduled. Returns those that were
    scheduled, the winner first, and a row for everything else.

    ``known``: candidates of another contest, whose orders serve the same routes here.
    """

    def wanted(option: Option) -> bool:
        return policy in ("auto", option.policy.name) or option.policy.always

    finalists, margin = (1, 0.005) if case.is_large else (_FINALISTS, 0.0)

    def entries(options: Sequence[Option], *first: int) -> list[tuple[tuple[object, ...], int, Option]]:
        numbered = zip(itertools.chain(first, numbers), options, strict=False)
        return [(_place(case, one, number, wanted(one)), number, one) for number, one in numbered]

    numbers = itertools.count()
    queue = entries(found)
    heapify(queue)
    worked: list[Candidate] = []
    rows: list[CandidateRow] = []
    left: list[Option] = []
    shapes = Counter[str]()  # number of scheduled shapes by policy
    settled = False  # an option of the policy asked for can be had
    while queue:
        _, number, option = heappop(queue)
        best = max((one.score for one in worked), default=-math.inf)
        promise = option.promise(case)
        hopeless = settled and not wanted(option)
        if worked:
            hopeless |= _on_paper(promise) <= _on_paper(best + margin * abs(best))
        if option.policy.many_shapes:
            alike = [one.score for one in worked if one.option.policy is option.policy]
            hopeless |= bool(alike) and promise <= max(alike) + ALIKE * abs(best)
            hopeless |= shapes[option.policy.name] >= finalists
        if hopeless:
            left.append(option)
            continue
        try:
            if isinstance(option.found, LaidOut):
                shapes[option.policy.name] += 1
                worked.append(_work_out(case, option, option.found, best, longest_s, known))
                settled |= wanted(option)
            else:  # of equally good options those that had to be made come last
                own = (number,) if isinstance(option.found, Drawn) else ()
                queue += entries(_nearer(case, option), *own)
                heapify(queue)
        except PlanInfeasible as error:
            rows.append(unscored(option.name, None, f"{option.note}: {error}"))
    worked.sort(key=lambda one: (-_on_paper(one.score), one.transition_s))
    if worked:
        rows += [row_of(case, one, False, lost_to(one, worked[0])) for one in worked[1:]]
        rows += left_over(case, left, worked[0], wanted)
    return worked, rows


def _place(case: Case, option: Option, number: int, is_wanted: bool) -> tuple[object, ...]:
    """Return the key by which options come in order."""
    first = (not option.policy.many_shapes, not isinstance(option.found, LaidOut)) if case.is_large else ()
    return (not is_wanted, *first, -_on_paper(option.promise(case)), number)


def _nearer(case: Case, option: Option) -> list[Option]:
    """Return ``option`` one step nearer to being scheduled: with a tighter bound if it has one, then drawn, also with
    replicas apart if it has them not, then laid out. In large jobs (``Case.is_large``) the last two are one
    step, and replicas are apart. Raises PlanInfeasible.
    """
    sketch = option.found
    if not isinstance(sketch, Sketch):
        return [laid_out(case, option)]
    if sketch.tighter:
        least_s = max(option.least_step_s, sketch.tighter())
        return [replace(option, least_step_s=least_s, found=replace(sketch, tighter=None))]
    made = Proposal(layout=sketch.make(), note=option.note)
    least_holders = sketch.least_holders or case.job.least_holders
    found = drawn(case, option.policy, made, least_holders=least_holders)
    others = with_replicas_apart(case, found)
    if case.is_large:
        return others or [laid_out(case, found)]
    return [found, *others]


def _on_paper(score: float) -> float:
    """Return ``score`` to 10 digits, so that of options that are equal on paper the one that changes less wins."""
    return float(f"{score:.10g}")


def _work_out(
    case: Case, option: Option, found: LaidOut, best: float, longest_s: float, known: Sequence[Candidate]
) -> Candidate:
    """Schedule ``option`` and score it. An order of the ``known`` candidates for the same routes, and for no more
    memory, is taken over.

    Raises PlanInfeasible as soon as the score of an order that has to be found cannot exceed ``best``, or its step is
    longer than ``longest_s``.
    """
    TURNS.pause()
    costs, layout = case.profile.costs, found.layout
    before_s = None
    if best > -math.inf:
        longest_s = min(longest_s, option.longest_step_s(case, best))
    if longest_s < math.inf:
        before_s = computed_before_s(layout, costs, longest_s * SLACK)
    order = next((one.order for one in known if _serves(one.found, found)), None) or order_routes(
        layout,
        costs,
        in_flight_cap=found.caps,
        speeds=case.speeds,
        before_s=before_s,
        thorough=case.thorough,
    )
    step_s = step_end_s(layout, costs, order.done_s, order.tails())
    score = case.score(step_s, option.least_transition_s, option.fatal_share)
    return Candidate(option=option, found=found, order=order, step_s=step_s, score=score)


def _serves(one: LaidOut, other: LaidOut) -> bool:
    """Whether what is an order for ``one`` is one for ``other``: workers without routes are in orders, too."""
    ours, theirs = ((of.layout.routes, of.layout.workers) for of in (one, other))
    return ours == theirs and all(one.caps[worker] <= cap for worker, cap in other.caps.items())
