"""The options: what policies propose, each with a bound of its cost, before anything is scheduled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.bound import Bound
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.communicators import Needs, taken_bytes
from odyssey_megatron.plan.placing.memory import caps_for
from odyssey_megatron.plan.placing.redundancy import with_keepers, with_shadows
from odyssey_megatron.plan.placing.spread import apart
from odyssey_megatron.plan.placing.transfer import plan_transfers, transfer_s
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.scheduling.order import Order
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.policies import POLICIES
from odyssey_megatron.policy.proposal import Policy, Proposal, Sketch
from odyssey_megatron.policy.routes.links import around


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A drawn layout: its holders and keepers are settled, with the redundancy asked for, but not yet
    what has to move.
    """

    layout: Layout
    caps: dict[int, int]
    """What each worker may keep in memory: see :func:`caps_for`. Communicators take what they need first."""
    bound: Bound
    """The lower bound of its step, for any caps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut(Drawn):
    """A drawn layout with the transfers that lead there. Only options that may win by their step need them."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A policy's proposal with bounds. It has not been scheduled yet."""

    policy: Policy
    name: str
    note: str
    least_step_s: float
    """A lower bound of the step; for a sketch it may be an estimate."""
    least_transition_s: float
    """A lower bound of the transition; the transition itself once the option is laid out."""
    fatal_share: float
    found: Drawn | Sketch

    def promise(self, case: Case) -> float:
        """Return the best score that it could have."""
        return case.score(self.least_step_s, self.least_transition_s, self.fatal_share)

    def longest_step_s(self, case: Case, score: float) -> float:
        """Return the step with which it would have ``score``; infinite if it has a higher score with any step."""
        one, two = (case.score(step_s, self.least_transition_s, self.fatal_share) for step_s in (1.0, 2.0))
        gain = 2 * (one - two)  # the score is gain / step - risk
        above = score - (one - gain)
        return gain / above if above > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An option worked out far enough to be scored."""

    option: Option
    found: LaidOut
    order: Order
    step_s: float
    score: float

    @property
    def layout(self) -> Layout:
        return self.found.layout

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return self.found.transfers

    @property
    def transition_s(self) -> float:
        return self.option.least_transition_s


Tried = tuple[Policy, Proposal, Option | None]
"""(policy, proposal without redundancy, the option made of it or None if it does not fit)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All that the policies have proposed."""

    found: tuple[Option, ...]
    impossible: tuple[tuple[str, str], ...]
    """(name, reason) of each option that is impossible."""
    tried: tuple[Tried, ...]


def options(case: Case) -> Options:
    """Return the options in the policies' order; those that are still to be made come last."""
    tried: list[Tried] = []
    sketches: list[Option] = []
    impossible: list[tuple[str, str]] = []
    for policy, proposal in _proposals(case, impossible):
        if isinstance(proposal, Sketch):
            sketches.append(_sketched(case, policy, proposal))
            if case.spare_holders and proposal.fatal_share:
                note = f"{proposal.note}, with new shadows"
                safer = replace(proposal, note=note, fatal_share=0.0, least_holders=case.spare_holders)
                sketches.append(_sketched(case, policy, safer))
            continue
        option = _possible(case, policy, proposal, impossible)
        tried.append((policy, proposal, option))
        if option and proposal.settles:
            return Options(found=(option,), impossible=tuple(impossible), tried=tuple(tried))
    found = _shadowed(case, tried, impossible)
    found += [other for option in found for other in with_replicas_apart(case, option)]
    return Options(found=(*found, *sketches), impossible=tuple(impossible), tried=tuple(tried))


def options_with_less(case: Case, proposed: Options, why: str) -> Options:
    """Return options with less redundancy than those ``proposed``, none of which fits; ``why`` says why not.

    Layers get no shadows that ``case`` does not ask for. With a limited number of copies of optimizer state there are
    also options in which lost copies are not replaced.
    """
    stay = without_transfers(case, proposed.tried, math.inf) if case.job.optimizer_copies else []
    bare = options(case)
    impossible = (("redundancy", f"as it was asked for: {why}"), *bare.impossible)
    return Options(found=(*stay, *bare.found), impossible=impossible, tried=proposed.tried)


def _proposals(case: Case, impossible: list[tuple[str, str]]) -> Iterator[tuple[Policy, Proposal | Sketch]]:
    for policy in POLICIES:
        try:
            for proposal in policy.propose(case):
                yield policy, proposal
        except PlanInfeasible as error:
            impossible.append((policy.name, str(error)))


def _possible(
    case: Case,
    policy: Policy,
    proposal: Proposal,
    impossible: list[tuple[str, str]],
    *,
    least_holders: int = 0,
    joins: bool = True,
) -> Option | None:
    try:
        return drawn(case, policy, proposal, least_holders=least_holders, joins=joins)
    except PlanInfeasible as error:
        note = f"{proposal.note}: " if least_holders else ""
        impossible.append((policy.name, f"{note}{error}"))
        return None


def _sketched(case: Case, policy: Policy, sketch: Sketch) -> Option:
    return Option(
        policy=policy,
        name=policy.name,
        note=sketch.note,
        least_step_s=sketch.least_step_s,
        least_transition_s=case.profile.group_build_s,
        # With shadows for all layers that need them no loss is fatal.
        fatal_share=0.0 if (sketch.least_holders or case.job.least_holders) > 1 else sketch.fatal_share,
        found=sketch,
    )


def _shadowed(case: Case, tried: Sequence[Tried], impossible: list[tuple[str, str]]) -> list[Option]:
    """Return the options of ``tried``, and those with new shadows for layers that have too few holders.

    Where shadows were asked for, an option with new ones replaces the one without; otherwise it is added. State moves
    for the shadows, behind the next steps where ranks would wait for it (``two_speed.py``).
    """
    asked = case.job.least_holders
    least, may_move = asked or case.spare_holders, case.is_larger or case.rebalances
    found, safer = list[Option](), list[Option]()
    for policy, proposal, option in tried:
        if option is None:
            continue
        assert isinstance(option.found, Drawn)
        layout, shadowed = option.found.layout, None
        if least and (asked or option.fatal_share) and (may_move or not policy.stays):
            more = replace(proposal, layout=layout, note=f"{proposal.note}, with new shadows")
            shadowed = _possible(case, policy, more, impossible, least_holders=least)
        if shadowed and isinstance(shadowed.found, Drawn) and shadowed.found.layout.holders != layout.holders:
            safer.append(shadowed)
            if asked:
                continue
        found.append(option)
    return found + safer


def without_transfers(case: Case, tried: Sequence[Tried], longest_s: float) -> list[Option]:
    """Return the options of ``tried`` for which nothing needs to move, and whose step may be at most ``longest_s``.

    Lost copies of optimizer state are not replaced: it stays with the keepers that are left.
    """
    found = []
    for policy, proposal, option in tried:
        if option and option.least_step_s > longest_s:
            continue
        if case.job.optimizer_copies:
            option = _possible(case, policy, proposal, [], joins=False)
        option = laid_out(case, option) if option else None
        if option and isinstance(option.found, LaidOut) and not option.found.transfers:
            found.append(option)
    return found


def drawn(
    case: Case, policy: Policy, proposal: Proposal, *, least_holders: int = 0, joins: bool = True
) -> Option:
    """Return the option for ``proposal``, with its holders and keepers, and its bound.

    Args:
        least_holders: layers with fewer holders than this get shadows.
        joins: whether optimizer state that has too few keepers gets others.

    Raises:
        PlanInfeasible: it does not fit.
    """
    costs, layout = case.profile.costs, proposal.layout
    nodes = case.nodes
    if not policy.stays:
        layout = around(layout, costs)
    if least_holders:
        eager = case.job.eager_forwards
        layout = with_shadows(
            layout, case.previous, nodes, least_holders, costs, eager=eager, shares=case.shares
        )
    layout = with_keepers(layout, case.previous, nodes, case.job.optimizer_copies, joins=joins)
    # Between two steps layers move beside the first one, by communicators of their own: see ``laid_out``.
    taken = taken_bytes(Needs(layout), case.job) if case.lost else 0
    caps, bound = caps_for(layout, costs, case.shares, taken), Bound(layout, costs, case.speeds)
    return Option(
        policy=policy,
        name=proposal.name or policy.name,
        note=proposal.note,
        least_step_s=bound.with_caps(caps),
        least_transition_s=case.profile.group_build_s,
        fatal_share=case.fatal_share(layout),
        found=Drawn(layout=layout, caps=caps, bound=bound),
    )


def with_replicas_apart(case: Case, option: Option) -> list[Option]:
    """Return ``option``, which has a layout, with replicas on different nodes, if the job wants them there and the loss
    of a node would end it; at most one option.
    """
    one = option.found
    if not case.node_share or option.policy.stays or not isinstance(one, Drawn) or not option.fatal_share:
        return []
    layout = replace(one.layout, keepers=(), copies=0)
    moved = apart(layout, case.previous, case.nodes, case.job.optimizer_copies, case.slow.get)
    if moved is layout:
        return []
    proposal = Proposal(layout=moved, note=f"{option.note}, replicas on different nodes", name=option.name)
    found = _possible(case, option.policy, proposal, [])
    return [found] if found and found.fatal_share < option.fatal_share else []


def laid_out(case: Case, option: Option) -> Option:
    """Return ``option``, which has a layout, with the transfers that lead there, and room for them."""
    one = option.found
    assert isinstance(one, Drawn)
    costs = case.profile.costs
    transfers = plan_transfers(case.previous, one.layout, case.alive, costs)
    caps, least_step_s = one.caps, option.least_step_s
    if not case.lost and (taken := taken_bytes(Needs(one.layout, transfers, beside=True), case.job)):
        caps = caps_for(one.layout, costs, case.shares, taken)
        least_step_s = one.bound.with_caps(caps)
    return replace(
        option,
        least_step_s=least_step_s,
        least_transition_s=case.profile.group_build_s + transfer_s(transfers, costs),
        found=LaidOut(layout=one.layout, caps=caps, bound=one.bound, transfers=transfers),
    )


def restart(case: Case) -> tuple[float, float, float] | str:
    """Return (least step, score, share of losses that end the job) of stopping and starting anew from a checkpoint, or
    why that is impossible.

    The job would have as many whole pipelines of its size as the living workers make, and the other workers would be
    idle. The transition is the profile's ``restart_s``, which includes the steps lost since the checkpoint. This is for
    comparison: a running job cannot choose it.
    """
    alive, stages = case.whole, case.job.pipeline_model_parallel_size
    try:
        step_s = case.restarted_step_s(alive)
    except PlanInfeasible as error:
        return str(error)
    fatal_share = stages / alive if alive < 2 * stages or case.job.num_microbatches == 1 else 0.0
    return step_s, case.score(step_s, case.profile.restart_s, fatal_share), fatal_share
