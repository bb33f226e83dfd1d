"""What a recovery could do: each option with the least it can cost, before it is worked out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.bound import lower_bound_s
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.memory import activation_caps, fullest_bytes
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.redundancy import with_keepers, with_shadows
from odyssey_megatron.plan.transfer import plan_transfers, transfer_s
from odyssey_megatron.policy.candidates import drop_pipelines, reroute, shift_layers
from odyssey_megatron.policy.profile import Profile
from odyssey_megatron.policy.score import expected_tokens
from odyssey_megatron.policy.search import Search, place, search_for


@dataclass(frozen=True, kw_only=True)
class Case:
    """The arguments of one decision, and what follows from them."""

    job: JobSpec
    state: ClusterState
    previous: Layout
    usual_step_s: float
    """Of the previous plan."""
    profile: Profile
    horizon_s: float
    mtbf_s: float
    home: Layout | None = None
    """Of the failure-free plan, where the job comes from."""
    thorough: bool = False
    """Nobody waits for it."""

    @cached_property
    def unmoved(self) -> tuple[Unmoved, ...]:
        """See :func:`unmoved`."""
        return unmoved(self)

    @cached_property
    def speeds(self) -> dict[int, float]:
        """Only of workers that differ from a healthy one."""
        return worker_speeds(self.state)

    @property
    def search(self) -> Search:
        """For ragged pipelines, with what earlier decisions have worked out."""
        costs = self.profile.costs
        return search_for(costs, costs.memory_bytes, self.job.optimizer_copies)

    def score(self, step_s: float, transition_s: float, fatal_share: float = 0.0) -> float:
        """See :func:`odyssey_megatron.policy.score.expected_tokens`."""
        return expected_tokens(
            tokens_per_step=self.job.tokens_per_step,
            step_s=step_s,
            transition_s=transition_s,
            mtbf_s=self.mtbf_s,
            horizon_s=self.horizon_s,
            fatal_share=fatal_share,
            restart_s=self.profile.restart_s,
            usual_step_s=self.usual_step_s,
        )

    def longest_step_s(self, score: float, option: Option) -> float:
        """The step with which ``option`` would have ``score``; infinite if it has that with any."""
        one, two = (
            self.score(step_s, option.least_transition_s, option.fatal_share) for step_s in (1.0, 2.0)
        )
        gain = 2 * (one - two)  # the score is gain / step - risk
        above = score - (one - gain)
        return gain / above if above > 0 else math.inf

    def promise(self, option: Option) -> float:
        """The best score that ``option`` could have."""
        return self.score(option.least_step_s, option.least_transition_s, option.fatal_share)

    def fatal_share(self, layout: Layout) -> float:
        """Share of the living workers whose death would leave some layer of ``layout`` without a holder."""
        alone = {states[0] for states in layout.states if len(states) == 1}
        return len(alone) / len(self.state.alive)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """A layout, how to get there, and what it may keep in memory."""

    layout: Layout
    transfers: tuple[Transfer, ...]
    caps: dict[int, int]
    """See :func:`caps_for`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A candidate that has not been scheduled yet."""

    name: str
    note: str
    least_step_s: float
    """A bound; before a replan is laid out, an estimate that leaves out what messages and reductions cost."""
    least_transition_s: float
    """The transition itself, once it is laid out."""
    fatal_share: float
    found: LaidOut | Callable[[], Layout]
    """May raise PlanInfeasible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmoved:
    """A layout whose holders are those before, without the dead."""

    name: str
    note: str
    layout: Layout | None
    """Without what is decided of redundancy; None if it cannot be had."""
    option: Option | str
    """With that; or why it cannot be had."""


def worker_speeds(state: ClusterState) -> dict[int, float]:
    """Worker -> speed, where it differs from a healthy worker's."""
    return {w.worker: w.speed for w in state.workers if w.speed != 1.0}


def caps_for(layout: Layout, profile: Profile) -> dict[int, int]:
    """Bytes of activations for each worker. Raises PlanInfeasible if the state alone does not fit.

    Workers are alike, so where memory is not known each may fill what 1F1B's fullest worker needs.
    """
    budget = profile.costs.memory_bytes
    if budget is None:
        budget = fullest_bytes(layout, profile.costs)
    return activation_caps(layout, profile.costs, budget_bytes=budget)


def options(case: Case) -> tuple[list[Option], list[tuple[str, str]]]:
    """All options, and (name, reason) of what cannot be had at all."""
    found: list[Option] = []
    impossible: list[tuple[str, str]] = []
    alive, costs = case.state.alive, case.profile.costs
    if set(case.previous.workers) <= set(alive):
        found.append(lay_out(case, "keep", "no member of the layout is lost", case.previous))
        if case.home is not None and set(alive) - set(case.previous.workers):
            _add_return(case, case.home, found, impossible)
            if not case.state.dead and not case.speeds and found[-1].name == "rejoin":
                return found[-1:], impossible  # all are back: the job is what it was
        if case.speeds:
            layout = reroute(case.previous, alive, costs, case.speeds)
            found.append(lay_out(case, "rebalance", "microbatches moved off slow workers", layout))
        if case.speeds or len(alive) > len(case.previous.workers):
            _add_replans(case, found, impossible)
        return found, impossible
    for one in case.unmoved:
        if isinstance(one.option, Option):
            found.append(one.option)
        else:
            impossible.append(("reroute" if one.name == "takeover" else one.name, one.option))
    _add_shadowed(case, found, impossible)
    _add_replans(case, found, impossible)
    return found, impossible


def unmoved(case: Case) -> tuple[Unmoved, ...]:
    """After a loss: the layouts for which at most optimizer state has to move."""
    alive, costs = case.state.alive, case.profile.costs
    found: list[Unmoved] = []

    def add(name: str, note: str, make: Callable[[], Layout]) -> Layout | None:
        try:
            layout = make()
        except PlanInfeasible as error:
            found.append(Unmoved(name=name, note=note, layout=None, option=str(error)))
            return None
        shown = "takeover" if name == "reroute" and _takes_over(case.previous, layout) else name
        found.append(
            Unmoved(name=shown, note=note, layout=layout, option=_laid_out(case, shown, note, layout))
        )
        return layout

    rerouted = add("reroute", "layout kept", lambda: reroute(case.previous, alive, costs, case.speeds))
    add("drop", "broken pipelines dropped", lambda: drop_pipelines(case.previous, alive))
    if rerouted is not None:
        shifted = "rerouted, stage boundaries moved"
        add("shift", shifted, lambda: shift_layers(rerouted, costs, case.speeds))
    return tuple(found)


def at_once(case: Case) -> list[Option]:
    """Of those what needs nothing to move: optimizer state that was lost stays with those who have it still."""
    found = []
    for one in case.unmoved:
        option = one.option
        if case.job.optimizer_copies and one.layout is not None:
            option = _laid_out(case, one.name, one.note, one.layout, joins=False)
        if isinstance(option, Option) and isinstance(option.found, LaidOut) and not option.found.transfers:
            found.append(option)
    return found


def _laid_out(case: Case, name: str, note: str, layout: Layout, *, joins: bool = True) -> Option | str:
    """:func:`lay_out`, or why that cannot be."""
    try:
        return lay_out(case, name, note, layout, joins=joins)
    except PlanInfeasible as error:
        return str(error)


def _add_return(case: Case, home: Layout, found: list[Option], impossible: list[tuple[str, str]]) -> None:
    """The first layout, as far as its workers are alive."""
    complete = set(home.workers) <= set(case.state.alive)
    try:
        layout = home if complete else reroute(home, case.state.alive, case.profile.costs, case.speeds)
        note = "back to the first layout" if complete else "the first layout without the dead"
        found.append(lay_out(case, "rejoin", note, layout))
    except PlanInfeasible as error:
        impossible.append(("rejoin", str(error)))


def _takes_over(previous: Layout, layout: Layout) -> bool:
    """Whether a worker computes layers of ``layout`` that it only held before: a shadow's."""

    def computed(one: Layout) -> set[tuple[int, int]]:
        return {
            (hop.worker, layer)
            for route in one.routes
            for hop in route.hops
            for layer in range(hop.first, hop.last)
        }

    return not computed(layout) <= computed(previous)


def _add_shadowed(case: Case, found: list[Option], impossible: list[tuple[str, str]]) -> None:
    """Each option once more, with new shadows for what has lost its second holder: safer, but state moves first."""
    for option in list(found) if case.job.least_holders else ():
        if isinstance(option.found, LaidOut):
            note = f"{option.note}, with new shadows"
            try:
                shadowed = lay_out(case, option.name, note, option.found.layout, shadowed=True)
            except PlanInfeasible as error:
                impossible.append((option.name, f"{note}: {error}"))
                continue
            if isinstance(shadowed.found, LaidOut) and shadowed.found.layout != option.found.layout:
                found.append(shadowed)


def lay_out(
    case: Case, name: str, note: str, layout: Layout, *, shadowed: bool = False, joins: bool = True
) -> Option:
    """The option of ``layout``, with its bound and its transition.

    Args:
        shadowed: with a shadow for each layer that has too few holders.
        joins: optimizer state that has too few keepers gets others.

    Raises:
        PlanInfeasible: it does not fit.
    """
    profile, costs = case.profile, case.profile.costs
    nodes = {worker.worker: worker.node for worker in case.state.workers if worker.alive}
    if shadowed:
        job = case.job
        layout = with_shadows(
            layout, case.previous, nodes, job.least_holders, costs, eager=job.eager_forwards
        )
    copies = case.job.optimizer_copies
    layout = with_keepers(layout, case.previous, nodes, copies, costs, joins=joins)
    transfers = plan_transfers(case.previous, layout, case.state.alive, costs)
    caps = caps_for(layout, profile)
    return Option(
        name=name,
        note=note,
        least_step_s=lower_bound_s(layout, costs, case.speeds, caps),
        least_transition_s=profile.group_build_s + transfer_s(transfers, costs),
        fatal_share=case.fatal_share(layout),
        found=LaidOut(layout=layout, transfers=transfers, caps=caps),
    )


def _add_replans(case: Case, found: list[Option], impossible: list[tuple[str, str]]) -> None:
    """Balanced shapes over all living workers and, if some are slow, over the others alone."""
    alive, speeds = case.state.alive, case.speeds
    groups = {alive, tuple(worker for worker in alive if speeds.get(worker, 1.0) >= 1.0)}
    search = case.search
    before = len(found)
    for workers in sorted(filter(None, groups), reverse=True):
        without = f" without {len(alive) - len(workers)} slow" if len(workers) < len(alive) else ""
        for estimate_s, pipelines in search.ranked(len(workers), case.job.num_microbatches):
            found.append(_replan(case, workers, pipelines, estimate_s, without))
    if len(found) == before:
        impossible.append(("replan", search.why_not(len(alive))))


def _replan(case: Case, workers: tuple[int, ...], pipelines: int, estimate_s: float, without: str) -> Option:
    costs, search = case.profile.costs, case.search

    def layout() -> Layout:
        shape = search.shape(len(workers), case.job.num_microbatches, pipelines)
        return place(shape, workers, case.previous, costs, case.speeds)

    return Option(
        name="replan",
        note=f"pipelines {search.lengths(len(workers), pipelines)}{without}",
        least_step_s=estimate_s,
        least_transition_s=case.profile.group_build_s,
        fatal_share=min(len(workers), search.most_stages) / len(case.state.alive) if pipelines == 1 else 0.0,
        found=layout,
    )


def restart(case: Case) -> tuple[float, float] | str:
    """(least step, score) of stopping and starting anew from a checkpoint, or why that cannot be.

    As many whole pipelines of the job's size as the living make, the rest of them idle; the transition is the profile's
    ``restart_s``, which counts the steps lost since the checkpoint too. For comparison: a running job cannot choose it.
    """
    alive, job, costs = len(case.state.alive), case.job, case.profile.costs
    stages = job.pipeline_model_parallel_size
    pipelines = min(alive // stages, job.num_microbatches)
    if pipelines == 0:
        return f"a pipeline needs {stages} workers, {alive} are alive"
    search = case.search
    step_s = search.estimate_s(pipelines * stages, job.num_microbatches, pipelines)
    if step_s is None:
        return search.why_not(stages)
    step_s += costs.optimizer_s
    fatal_share = stages / alive if pipelines == 1 else 0.0
    return step_s, case.score(step_s, case.profile.restart_s, fatal_share)
