"""The rows of a decision's table of candidates: what each option would have cost, and why it was taken or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from odyssey_megatron.plan.sending.generation import CandidateRow
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.options import Candidate, Option, restart
from odyssey_megatron.policy.shapes.pipelines import ALIKE


def why(best: Option, policy: str, rows: list[CandidateRow]) -> str:
    if policy == "auto" or best.policy.always:
        return f"{best.note}; best score"
    if best.policy.name == policy:
        return f"{best.note}; --odyssey-policy {policy}"
    reasons = "; ".join(row.reason for row in rows if row.name == policy)
    return f"{best.note}; --odyssey-policy {policy} is impossible: {reasons}"


def row_of(case: Case, one: Candidate, chosen: bool, reason: str) -> CandidateRow:
    next_loss, risk = _next_loss(case, one.option.fatal_share)
    return CandidateRow(
        name=one.option.name,
        step_s=one.step_s,
        transition_s=one.transition_s,
        score=one.score,
        chosen=chosen,
        reason=reason + risk,
        next_loss=next_loss,
    )


def _next_loss(case: Case, share: float) -> tuple[float, str]:
    """Return what the next loss takes from a score if ``share`` of losses end the job, and the end of the reason."""
    if not share:
        return 0.0, ""
    slower = f", then {1 - case.left:.0%} slower" if case.left < 1 else ""
    told = f"; {share:.0%} of losses end the job ({case.profile.restart_s:,.0f} s{slower})"
    return case.next_loss(share), told


def restart_row(case: Case, best: float) -> CandidateRow:
    found = restart(case)
    if isinstance(found, str):
        return unscored("restart", None, found)
    step_s, score, share = found
    next_loss, risk = _next_loss(case, share)
    return CandidateRow(
        name="restart",
        step_s=step_s,
        transition_s=case.profile.restart_s,
        score=score,
        chosen=False,
        reason=f"whole pipelines, from a checkpoint; {_beside(score, best)}"
        + ("" if score <= best else "; nothing that a running job can choose")
        + risk,
        next_loss=next_loss,
    )


def lost_to(one: Candidate, chosen: Candidate) -> str:
    """Return the reason of a row that another one has won against."""
    return f"{one.option.note}; {_beside(one.score, chosen.score)}"


def _beside(score: float, best: float) -> str:
    """Return ``score`` relative to ``best``, in words. Scores are negative where the next failure would cost more than
    can be gained.
    """
    if best <= 0 or score < 0:
        return f"score {score:,.0f}"
    return f"{abs(1 - score / best):.1%} {'fewer' if score <= best else 'more'} tokens"


def unscored(name: str, step_s: float | None, reason: str) -> CandidateRow:
    return CandidateRow(name=name, step_s=step_s, transition_s=None, score=None, chosen=False, reason=reason)


def left_over(
    case: Case, left: list[Option], best: Candidate, wanted: Callable[[Option], bool]
) -> list[CandidateRow]:
    """Return a row for each option that was not scheduled; all shapes of a policy that has many share one row."""
    rows = []
    shapes = Counter(option.policy.name for option in left if option.policy.many_shapes)
    for option in left:
        many = option.policy.many_shapes
        count = shapes.pop(option.policy.name, 0)
        if many and not count:
            continue  # included in the row of the first
        more = f" (and {count - 1} more shapes)" if count > 1 else ""
        promise = option.promise(case)
        if not wanted(option):
            reason = "not the policy asked for"
        elif promise <= best.score * (1 + ALIKE) or not many:
            reason = f"not scheduled: at best {_beside(promise, best.score)}"
        else:
            reason = "not scheduled: behind others by its estimate"
        row = unscored(option.name, option.least_step_s, f"{option.note}{more}; {reason}")
        if row not in rows:  # its twin says nothing new
            rows.append(row)
    return rows
