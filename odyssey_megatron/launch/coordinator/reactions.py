"""The coordinator's logic as pure functions: ``react(job, events) -> (job, actions)``.

The coordinator (``coordinator.py``) receives the events and carries out the actions. If an action needs a plan it asks
the planner, and puts the decision into the job's state by :func:`published` or :func:`offered`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from odyssey_megatron.cluster.events import (
    Event,
    GenerationLive,
    NodeLeaves,
    NodeLost,
    OfferFailed,
    RankDied,
    RankFinished,
    RankJoined,
    Retry,
    together,
)
from odyssey_megatron.cluster.state import (
    ClusterState,
    apply,
    is_old,
    lost_between,
    next_generation,
    offer_generation,
    without_fresh,
)
from odyssey_megatron.errors import (
    ENDS_OF_RANKS,
    EXIT_ALIKE,
    EXIT_BAD_INPUT,
    EXIT_LAYERS_LOST,
    EXIT_UNSOUND,
    LayersLost,
)
from odyssey_megatron.launch.coordinator.offer_tries import OfferTries
from odyssey_megatron.launch.wire.verdict import JobVerdict
from odyssey_megatron.plan.placing.groups import timed_pairs
from odyssey_megatron.plan.placing.transfer import check_living
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import Finished, Generation, Stop

_MAX_FRUITLESS = 20
"""Number of requests for fresh groups in a row that the job survives, if meanwhile no work was done and no rank died
or joined. More of them end it, unless a member that has not entered the generation may still come.
"""
_FRUITLESS = (
    "{count} generations in a row have come to nothing: not one step was done in them, though nobody died. In the last "
    "one {wanted}. Something fails on all ranks alike, or nodes that reach the job's host do not reach each "
    "other; their logs may say what. Restart from the last checkpoint."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """All that the coordinator knows about a job."""

    cluster: ClusterState
    nodes: tuple[int, ...]
    """Node of each rank at the start."""
    exits: Mapping[int, int] = field(default_factory=dict)
    """Rank -> exit code, for ranks that have ended and are not back."""
    start_plan: Plan | None = None
    live_plan: Plan | None = None
    """Plan of the last generation that every member reported live; its holders have all of their state."""
    current: Generation | None = None
    """The last generation that all members have to enter."""
    offered: Generation | None = None
    tries: OfferTries = field(default_factory=OfferTries)
    fruitless: int = 0
    """Number of requests for fresh groups in a row without any work done in between."""
    fruitless_since_s: float = 0.0
    done: int = 0
    """Number of pieces of common work (steps, evaluations, checkpoints) done, by the members' reports."""
    early: int = -1
    """Number of steps after which a signal has ended the job; -1 if none did."""
    asking: frozenset[int] = frozenset()
    """Nodes whose agents wait for the answer whether they may leave."""

    @property
    def known_plan(self) -> Plan | None:
        """The plan of the last live generation, or the first plan before any generation is live."""
        return self.live_plan or self.start_plan

    def ranks_on(self, node: int) -> list[int]:
        """Return the ranks that were on ``node`` at the start, in ascending order."""
        return [rank for rank, its in enumerate(self.nodes) if its == node]

    @property
    def may_offer(self) -> bool:
        """Whether all members are live, none has finished, and no generation is on offer."""
        cluster = self.cluster
        return self.live_plan is not None and not (cluster.offered or cluster.finished) and cluster.is_live

    def may_offer_at(self, now_s: float) -> bool:
        """Whether a generation may be offered, and the last offers have not failed too recently for it."""
        return self.may_offer and not self.tries.waits(now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Write an event into the journal, and show it to the user."""

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer a rank that asks to join.

    ``newest`` is the number of the last generation before it joined, or None if it is refused, as the rank is alive.
    """

    joined: RankJoined
    newest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Delete what generations before ``number`` have left in the store: all members have entered that one."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Delete what offered generation ``number``, which has failed, and those before it have left in the store, back to
    generation ``after``, in which the job is.
    """

    number: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover:
    """Decide on a plan for the ranks that are left."""

    dead: tuple[int, ...]
    why: str
    full: tuple[tuple[Plan, int], ...] = ()
    """(plan, rank) of each rank that has run out of memory under a plan."""


Action = Report | Answer | Forget | Withdraw | Recover | Stop | Finished | JobVerdict
"""What the coordinator is to do. With ``Stop`` and ``Finished`` it tells the members that the job ends; with
``JobVerdict`` the job is over at once.
"""


def react(
    job: JobState, events: Sequence[Event], *, now_s: float, refused: str = ""
) -> tuple[JobState, list[Action]]:
    """Return what follows from the events of one incident.

    Args:
        refused: the message of a rank that refuses to train or cannot trust its numbers, if there is one.

    Returns:
        The job after the events, and the actions to carry out, in order. At most one action ends the job or needs a
        plan, and it is the last.
    """
    before, actions, wanted, lost, patience_s = job.cluster, list[Action](), "", set[int](), 0.0
    full = _full(job, events)
    for event in together(events):
        if isinstance(event, Retry) and event.generation in (before.generation, before.offered):
            wanted = f"rank {event.rank} asked for it: {event.reason}"
            patience_s = max(patience_s, event.patience_s)
        was = job.cluster
        job, more = _after(job, event, now_s)
        actions += more
        if was.leaving and job.cluster.failure_times_s == was.failure_times_s:
            continue  # no failure: the ranks that have gone were to leave
        lost |= lost_between(was, job.cluster)  # includes ranks that are back already
    finished = job.cluster.finished
    missed = lost - finished
    if lost:
        actions = _before_returns(job, deaths(job, lost, events), actions)
    if missed and (end := _hopeless(job, missed, refused)):
        return job, [*actions, end]
    if finished:
        left = (job.cluster.members & {*job.cluster.ranks, *finished}) - missed
        if left and left <= finished:  # with no member left, ranks that joined may still wait to be filled
            return job, [*actions, Finished(number=job.cluster.newest + 1)]
    since_s = job.fruitless_since_s if job.fruitless else now_s
    job = replace(job, fruitless=0 if lost else job.fruitless + bool(wanted), fruitless_since_s=since_s)
    if wanted and job.fruitless > _MAX_FRUITLESS and (before.is_live or now_s - since_s > patience_s):
        return job, [*actions, stop(job, _FRUITLESS.format(count=job.fruitless - 1, wanted=wanted), 1)]
    needed = before.members | (before.offered_members if before.offered else frozenset())
    if wanted or needed & missed:
        still = job.cluster.members & {*job.cluster.ranks}  # who is gone needs no plan with less
        full = tuple(one for one in full if one[1] in still)
        actions.append(Recover(dead=tuple(sorted(lost)), why=wanted or "failure", full=full))
    return job, actions


def _before_returns(job: JobState, report: Report, actions: Sequence[Action]) -> list[Action]:
    """Return ``actions`` with the ``report`` of deaths before the answers to processes that are still there.

    A rank's death and its new process may be heard of in one incident. What is journalled last of a rank tells whether
    it lives.
    """
    here = {*job.cluster.ranks, *job.cluster.joining, *job.cluster.returned}
    back = [one for one in actions if isinstance(one, Answer) and one.joined.rank in here]
    return [*(one for one in actions if one not in back), report, *back]


def _full(job: JobState, events: Sequence[Event]) -> tuple[tuple[Plan, int], ...]:
    """Return ``Recover.full``, by the plans that were there before the ``events``."""
    plans = {one.number: one.plan for one in (job.current, job.offered) if one is not None}
    return tuple(
        (plans[event.generation], event.rank)
        for event in events
        if isinstance(event, Retry) and event.out_of_memory and event.generation in plans
    )


def bury(job: JobState, events: Sequence[Event]) -> tuple[JobState, set[int]]:
    """Return the job after the deaths among ``events``, ignoring all other events, and the ranks that are lost."""
    before = job.cluster
    for event in events:
        if isinstance(event, (RankDied, NodeLost)):
            job, _ = _after(job, event, 0.0)
    return job, lost_between(before, job.cluster)


def _after(job: JobState, event: Event, now_s: float) -> tuple[JobState, list[Action]]:
    before, job = job.cluster, replace(job, cluster=apply(job.cluster, event))
    match event:
        case RankDied(rank=rank, code=code) if not is_old(before, event):
            # After a finished rank no other process of it is welcome: its first exit code counts.
            if rank not in before.finished or rank not in job.exits:
                job = replace(job, exits={**job.exits, rank: code})
        case NodeLost(node=node):
            exits = {**dict.fromkeys(job.ranks_on(node), -9), **job.exits}
            job = replace(job, exits=exits, asking=job.asking - {node})  # a later agent has not asked
        case NodeLeaves(node=node):
            job = replace(job, asking=job.asking | {node})
        case RankFinished(early=early):
            job = replace(job, early=early)
        case RankJoined(rank=rank):
            if job.cluster is before:
                return job, [Answer(joined=event, newest=None)]
            others = {one: code for one, code in job.exits.items() if one != rank}
            return replace(job, exits=others, tries=OfferTries(), fruitless=0), [
                Answer(joined=event, newest=job.cluster.newest)
            ]
        case OfferFailed(generation=number, reason=reason) if number == job.cluster.offered:
            cluster, tries = (
                replace(job.cluster, offered=0, leaving=frozenset()),
                job.tries.after_failure(now_s),
            )
            fields = {"generation": number, "why": reason}
            return replace(job, cluster=cluster, offered=None, tries=tries), [
                Report(name="offer_failed", fields=fields),
                Withdraw(number=number, after=cluster.generation),
            ]
        case GenerationLive():
            return _goes_on(job, event, before)
    return job, []


def _goes_on(job: JobState, event: GenerationLive, before: ClusterState) -> tuple[JobState, list[Action]]:
    if event.done > job.done:
        job = replace(job, done=event.done, fruitless=0)
    if not job.cluster.is_live:
        return job, []
    if job.offered is not None and job.cluster.generation == job.offered.number:
        job = replace(job, current=job.offered, offered=None, tries=OfferTries())
    if (current := job.current) is None:
        return job, []
    # Every member has entered this generation, so no rank still reads an earlier one. A rank that waits for a place and
    # is behind goes on with this one (``wire.control.FORGOTTEN``).
    is_new = not before.is_live or before.generation < job.cluster.generation
    return replace(job, live_plan=current.plan), [Forget(number=current.number)] * is_new


def has_all_layers(job: JobState) -> bool:
    """Return whether the ranks that are left have all layers, and their optimizer state, between them."""
    assert job.known_plan is not None
    try:
        check_living(job.known_plan.layout, without_fresh(job.cluster).alive)
    except LayersLost:
        return False
    return True


def deaths(job: JobState, lost: Collection[int], events: Sequence[Event]) -> Report:
    """Return the report that the ranks in ``lost`` have died, with the causes that ``events`` tell."""
    dead, reports = sorted(lost), {one.rank: one for one in events if isinstance(one, RankDied)}
    nodes = {one.node for one in events if isinstance(one, NodeLost)}
    causes = [
        reports[rank].cause if rank in reports else "node" if job.nodes[rank] in nodes else "cell"
        for rank in dead
    ]
    fields = {
        "generation": job.cluster.generation,
        "dead": dead,
        "code": [reports[rank].code if rank in reports else -9 for rank in dead],
        "cause": ",".join(sorted(set(causes))),
        "causes": causes,
    }
    return Report(name="failure_detected", fields=fields)


def _hopeless(job: JobState, lost: Collection[int], refused: str) -> Stop | JobVerdict | None:
    """Return how the job ends if no recovery can help, else None.

    That is so if a lost rank found bad input, an error that others share or numbers that it cannot trust; if ranks
    failed alike before any generation was live; or if no rank is left.
    """
    codes = {job.exits.get(rank, -9) for rank in lost}
    if EXIT_UNSOUND in codes:
        return stop(job, refused, EXIT_UNSOUND)
    if EXIT_ALIKE in codes:
        return stop(job, refused, 1)
    if EXIT_BAD_INPUT in codes and refused:
        return stop(job, refused, EXIT_BAD_INPUT)
    if not job.cluster.ranks or job.live_plan is None:
        if (alike := _alike(job, lost)) is not None:
            code, why = alike
            return JobVerdict(code=code, why=why)
    if not job.cluster.ranks:
        if not any(job.exits.get(rank, -9) for rank in range(len(job.nodes))):
            return JobVerdict(code=0)  # all left with exit code 0, though without finishing the job
        waiting = sorted({*job.cluster.waiting_ranks, *job.cluster.returned})
        but = f" that has layers: rank(s) {waiting} have come back, but hold nothing yet" if waiting else ""
        return JobVerdict(
            code=EXIT_LAYERS_LOST, why=f"no rank is left{but}. Restart from the last checkpoint."
        )
    return None


def stop(job: JobState, why: str, code: int) -> Stop:
    """Return the message that tells the members to leave with exit code ``code``."""
    return Stop(number=job.cluster.newest + 1, why=why, code=code)


def layers_lost(job: JobState, error: LayersLost) -> Stop:
    """Return the stop for a job whose remaining ranks do not hold all layers, so that no plan can be made for them."""
    if (alike := gone_alike(job)) is None:
        return stop(job, str(error), EXIT_LAYERS_LOST)
    code, why = alike
    if job.live_plan is None or not job.cluster.ranks:
        return stop(job, why, code)
    return stop(job, f"{error} {why[0].upper()}{why[1:]}", EXIT_LAYERS_LOST)


def gone_alike(job: JobState) -> tuple[int, str] | None:
    """As :func:`_alike`, for all ranks that are gone."""
    return _alike(job, [rank for rank in range(len(job.nodes)) if rank not in job.cluster.ranks])


def _alike(job: JobState, ranks: Collection[int]) -> tuple[int, str] | None:
    """Return exit code and message if ``ranks`` all failed by themselves with one exit code, so that no hardware was
    lost; else None. A code that no job ends with says that they left for the others' sake.
    """
    codes = {job.exits.get(rank, -9) for rank in ranks}
    if len(codes) != 1 or min(codes) <= 0 or codes <= ENDS_OF_RANKS:
        return None
    (code,) = codes
    return code, f"rank(s) {sorted(ranks)} ended with exit code {code}; their logs say why."


def published(
    job: JobState, plan: Plan, why: str, *, dead: tuple[int, ...] = (), decide_s: float = 0.0
) -> tuple[JobState, Generation]:
    """Make a new generation with ``plan``, which all remaining ranks have to enter.

    Earlier failures of offers no longer count: an offer that failed in the last generation may succeed from this one.
    """
    job = replace(job, cluster=next_generation(job.cluster), offered=None, tries=OfferTries())
    generation = _generation(job, plan, why, dead=dead, decide_s=decide_s)
    return replace(job, current=generation), generation


def offered(
    job: JobState, plan: Plan, why: str, *, decide_s: float, leaving: frozenset[int] = frozenset()
) -> tuple[JobState, Generation]:
    """Make a new generation with ``plan`` that is on offer: its members enter it between two steps, once all are
    prepared. The workers in ``leaving`` leave the job then.
    """
    job = replace(job, cluster=offer_generation(job.cluster, leaving))
    generation = _generation(job, plan, why, decide_s=decide_s)
    return replace(job, offered=generation), generation


def _generation(
    job: JobState, plan: Plan, why: str, *, dead: tuple[int, ...] = (), decide_s: float
) -> Generation:
    """Return the newest generation, which is on offer, or else has to be entered."""
    cluster = job.cluster
    previous = None if job.live_plan is None else job.live_plan.layout
    return Generation(
        number=cluster.newest,
        members=tuple(sorted(cluster.offered_members if cluster.offered else cluster.members)),
        dead=dead,
        why=why,
        previous=previous,
        plan=plan,
        plan_hash=plan.hash(),
        decide_s=decide_s,
        planned=bool(cluster.offered),
        incarnations=cluster.incarnations,
        fresh=cluster.waiting_ranks,
        timed=timed_pairs(plan.layout, cluster.nodes) if previous is None else (),
        shapes=cluster.shapes,
    )
