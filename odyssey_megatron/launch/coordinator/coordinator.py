"""The coordinator: the only writer of membership, generations and plans. It is a thread in the job's host.

It reads one queue of events. ``reactions.py`` says what follows from them, and the coordinator does it: it asks the
planner, publishes generations, answers ranks that join, and ends the job.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from odyssey_megatron.cluster.events import Event, GenerationLive, NodeLeaves, NodeLost, RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.places import ComesBack
from odyssey_megatron.cluster.state import initial_state, without_fresh
from odyssey_megatron.codec import from_json, to_json, to_jsonable
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import (
    EXIT_BAD_INPUT,
    ConfigError,
    ControlPlaneLost,
    LayersLost,
    OdysseyError,
    PlanInfeasible,
)
from odyssey_megatron.launch.coordinator import reactions
from odyssey_megatron.launch.coordinator.following import Following
from odyssey_megatron.launch.coordinator.learning import Learning
from odyssey_megatron.launch.coordinator.needed import Departures, fatal_loss
from odyssey_megatron.launch.coordinator.offers import NextPlan, Offers
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.coordinator.reactions import (
    Action,
    Answer,
    Forget,
    JobState,
    Recover,
    Report,
    Withdraw,
    stop,
)
from odyssey_megatron.launch.coordinator.rebalancing import Rebalancing
from odyssey_megatron.launch.coordinator.replacing import Replacing
from odyssey_megatron.launch.coordinator.said import Said
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire import generations
from odyssey_megatron.launch.wire.awake import Pauses
from odyssey_megatron.launch.wire.control import Control, EventReader
from odyssey_megatron.launch.wire.leases import Leases
from odyssey_megatron.launch.wire.verdict import (
    JobVerdict,
    after_training,
    before_training,
    by_signal,
    lost_before_training,
)
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.checking.units import check_units
from odyssey_megatron.plan.sending.generation import CandidateRow, Finished, Generation, Message, Stop
from odyssey_megatron.policy.table import candidates_table

_log = logging.getLogger(__name__)

_COALESCE_S = 0.003
"""Time within which all deaths of one incident reach the queue, so that one generation covers them all."""
_TICK_S = 0.1
_ALIKE_S = 3.0
"""Time within which all ranks that fail by the same mistake have ended, even on a busy machine."""
_WAITS_S = 60.0
"""How often the user is told which ranks have not ended after the last step. They are not stopped, since what their
scripts still write may be what the job was for.
"""
_STOP_GRACE_S = 1.5
"""How long ranks may take to leave by themselves after a stop, before they are made to (``verdict.ENDS_S``)."""


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Suspend garbage collection while the job waits for a decision.

    Collections that traverse a large plan again and again take as long as making the plan.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _EndedElsewhere(Exception):
    """An agent or ``odyssey host`` was sent a signal, and has given the job's verdict."""


class Coordinator:
    """Coordinates one job, from the first words of its ranks to the verdict.

    Args:
        nodes: rank -> its node.
        say: shows a text to the user.
        here: the node on which this coordinator runs; None if that node has no ranks.
        pauses: as for ``Leases``.
    """

    def __init__(
        self,
        *,
        control: Control,
        events: EventReader,
        config: OdysseyConfig,
        nodes: Mapping[int, int],
        planner: Planner,
        journal: Journal,
        say: Callable[[str], None],
        here: int | None = 0,
        pauses: Pauses | None = None,
    ):
        self._control, self._queue, self._planner = control, events, planner
        self._journal, self._say = journal, say
        self._mode = config.mode
        self._world_size = len(nodes)
        of_rank = tuple(nodes[rank] for rank in sorted(nodes))
        self._job = JobState(cluster=initial_state(nodes=of_rank, started_s=time.monotonic()), nodes=of_rank)
        others = sorted(set(of_rank) - {here})
        self._leases = Leases(control, others, config.node_lease_s, here=here, pauses=pauses)
        self._learning = Learning(planner, control, self._world_size)
        acts = config.rebalance == "auto"
        said = Said(journal, say)
        rebalancing = Rebalancing(planner, said, said.say, acts=acts, seeks=config.layout == "auto")
        replacing = Replacing(planner, said, said.say, acts=acts, restarts=config.respawn > 0)
        self._offers = Following(Offers(planner, rebalancing, replacing), said)
        self._departures = Departures()
        self._unheard: list[Event] = []
        self._agreed = 0
        """Number of the newest generation whose members are known to have agreed on how far they are."""

    def run(self) -> JobVerdict | None:
        """Run until the job ends, and publish and return its verdict; None if others gave it, or the store is gone."""
        gc.freeze()  # imported modules stay anyway, and a collection during a decision would take 0.1 s for them
        try:
            verdict = self._await_job() or (
                self._observe() if self._mode == "observe" else self._start() or self._train()
            )
        except (ControlPlaneLost, _EndedElsewhere):
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, agents and ranks must hear that the job ends
            self._say(traceback.format_exc())
            verdict = JobVerdict(code=1, why=f"the coordinator failed: {error!r}. Please report this.")
        finally:
            self._learning.close()
        verdict = by_signal(verdict, self._job.exits)
        self._journal.event("job_finished", verdict=verdict.why or "done", exit_code=verdict.code)
        verdict = replace(verdict, nodes=tuple(self._leases.nodes))
        self._control.put(keys.VERDICT, to_json(verdict))
        return verdict

    # -- before training ------------------------------------------------------------------------------

    def _await_job(self) -> JobVerdict | None:
        """Wait until all ranks have posted the job; return a verdict if one of them ends before that."""
        posted = [keys.digest_key(rank) for rank in range(self._world_size)]
        asked = list[Event]()  # they are answered once there is a plan
        while not self._control.has(posted):
            found = self._events(_TICK_S / 2)
            if found and self._control.has(posted):
                # These ranks died after all had posted: for their agents, too, the job was running by then.
                self._unheard = [*asked, *found]
                return None
            asked += [event for event in found if isinstance(event, NodeLeaves)]
            stranger = bool(found) and keys.is_stranger(self._control, self._mode)
            for event in found:
                if isinstance(event, NodeLost):
                    lost = lost_before_training(f"node {event.node} was lost", stranger=stranger)
                    return JobVerdict(code=1, why=lost)
                if isinstance(event, RankDied):
                    exits = {**self._job.exits, event.rank: event.code}
                    self._job = replace(self._job, exits=exits)
                    refused = self._refused()
                    if verdict := before_training(
                        event.rank, exits, self._world_size, refused, stranger=stranger
                    ):
                        return verdict
        self._unheard = asked
        return None

    def _start(self) -> JobVerdict | None:
        began_s, job = time.monotonic(), self._job
        try:
            posted = json.loads(self._control.get(keys.JOB))
            spec = from_json(JobSpec, posted["job"])
            spec.check(self._world_size)
            self._cell = spec.cell(0)
            cluster = initial_state(nodes=job.nodes, started_s=job.cluster.started_s, **spec.cells)
            self._job = job = replace(job, cluster=cluster)
            decided = self._planner.start(spec, cluster, posted["profile"])
        except (OdysseyError, ValueError) as error:
            return self._stop(
                stop(self._job, str(error), EXIT_BAD_INPUT if isinstance(error, ConfigError) else 1)
            )
        if fatal := fatal_loss(decided.plan.layout, cluster.nodes, spec.optimizer_copies):
            self._say(f"[odyssey] {fatal}")
        job = replace(job, start_plan=decided.plan)
        decide_s = time.monotonic() - began_s
        self._publish(reactions.published(job, decided.plan, "start", decide_s=decide_s), decided.rows)
        return None

    def _observe(self) -> JobVerdict:
        """Say what would be done about the first failure, and end the job, as a plain launcher would."""
        hopeless = self._start()  # the ranks do not read the generations that are published
        left, dead = set(range(self._world_size)), set[int]()
        while not dead:
            if not left:
                return JobVerdict(code=0)
            events = self._incident()
            ended = {one.rank for one in events if isinstance(one, RankDied) and one.code == 0}
            deaths = [one for one in events if not (isinstance(one, RankDied) and one.rank in ended)]
            left -= ended
            self._job, dead = reactions.bury(self._job, deaths)
        self._report(reactions.deaths(self._job, dead, deaths))
        verdict = hopeless or self._recover(Recover(dead=tuple(sorted(dead)), why="observed"))
        would = f"stopped: {verdict.why}" if verdict else "gone on as decided above."
        lost = f"the loss of rank(s) {sorted(dead)} ends the job, since --odyssey observe only looks on"
        return JobVerdict(code=1, why=f"{lost}; --odyssey recover would have {would}")

    # -- training -------------------------------------------------------------------------------------

    def _train(self) -> JobVerdict:
        while True:
            events = self._incident()
            if why := self._leases.left_alone(self._lost_with_ranks(events)):
                return self._stop(stop(self._job, why, 1))
            self._note_agreements(events)
            refused = self._refused() if any(isinstance(one, RankDied) for one in events) else ""
            self._job, actions = reactions.react(self._job, events, now_s=time.monotonic(), refused=refused)
            for action in actions:
                if verdict := self._do(action):
                    return verdict
            self._let_go()
            self._offer()

    def _note_agreements(self, events: Sequence[Event]) -> None:
        """Journal by this host's clock when members agreed: this host may have no rank that takes part, and the
        report needs all times on one clock.
        """
        for event in events:
            if (
                isinstance(event, GenerationLive)
                and event.agreed_ago_s is not None
                and event.generation > self._agreed
            ):
                self._agreed = event.generation
                agreed_s = time.monotonic() - event.agreed_ago_s
                self._journal.event("generation_agreed", generation=event.generation, agreed_s=agreed_s)

    def _do(self, action: Action) -> JobVerdict | None:
        """Carry out ``action``; return a verdict if it ends the job."""
        match action:
            case Report():
                self._report(action)
            case Answer():
                self._answer(action)
            case Forget(number=number):
                self._control.forget_before(number)
            case Withdraw(number=number, after=after):
                generations.withdraw(number, after, self._control)
            case Recover():
                with _nothing_collected():
                    return self._recover(action)
            case Stop():
                return self._stop(action)
            case Finished():
                return self._finish(action)
            case JobVerdict():
                return action
        return None

    def _report(self, report: Report) -> None:
        self._journal.event(report.name, echo=True, **report.fields)

    def _answer(self, answer: Answer) -> None:
        joined, newest = answer.joined, answer.newest
        key = keys.welcome_key(joined.rank, joined.incarnation)
        self._control.put(key, keys.NOT_WELCOME if newest is None else str(newest))
        if newest is not None:
            self._leases.watch(joined.node)
            self._departures.came_back(joined)
            self._journal.event("rank_joined", generation=newest, echo=True, target=joined.rank)

    def _let_go(self) -> None:
        """Tell the agents that ask whether their nodes may leave; while a plan is on offer, only that they may not."""
        job = self._job
        if not job.asking or job.live_plan is None or not job.cluster.is_live or job.cluster.finished:
            return
        for node in sorted(job.asking):
            if (why := self._departures.ask(node, job)) is None:
                continue
            if why:
                self._say(f"[odyssey] {self._departures.ends}: the job ends after the step at hand.")
            self._control.put(keys.may_leave_key(node), why)
            self._job = replace(self._job, asking=self._job.asking - {node})

    def _recover(self, wanted: Recover) -> JobVerdict | None:
        began_s, job = time.monotonic(), self._job
        known = job.known_plan
        assert known is not None
        self._learning.catch_up()
        for plan, rank in wanted.full:
            self._planner.ran_out(plan, rank // job.cluster.cell_size, job.cluster)
        try:
            decided = self._planner.decide(without_fresh(job.cluster), known, began_s)
        except LayersLost as error:
            self._hear_out()
            return self._stop(reactions.layers_lost(self._job, error))
        except OdysseyError as error:
            if wanted.full and isinstance(error, PlanInfeasible):
                return self._leave_out(wanted, error)
            anew = "Start anew from the last checkpoint, with as many GPUs as before, or with less on each of them"
            return self._stop(stop(job, f"the ranks that are left cannot go on: {error}. {anew}.", 1))
        plan = decided.plan
        self._offers.recovered(decided, job.live_plan)
        if job.live_plan is None:
            # Nobody has trained yet: every rank initializes its layers itself, and there is nothing to send.
            plan = replace(plan, transfers=(), transition_s=0.0)
        decide_s = time.monotonic() - began_s
        self._publish(
            reactions.published(job, plan, wanted.why, dead=wanted.dead, decide_s=decide_s), decided.rows
        )
        return None

    def _leave_out(self, wanted: Recover, error: PlanInfeasible) -> JobVerdict | None:
        """Go on without the ranks that have run out of memory, as no plan that needs less helps: count them as dead.

        If nobody else has their layers, that would end the job: they try once more as they are.
        """
        known, now_s = self._job.cluster, time.monotonic()
        full = sorted({rank for _, rank in wanted.full})
        deaths = [
            RankDied(rank=rank, code=-9, cause="memory", incarnation=known.incarnation_of(rank), t_s=now_s)
            for rank in full
        ]
        left, dead = reactions.bury(replace(self._job, fruitless=0), deaths)
        if self._job.fruitless <= 1 and not reactions.has_all_layers(left):
            self._say(
                f"[odyssey] rank(s) {full} have run out of memory, and nobody else has their layers; they try once "
                f"more: {error}"
            )
            return self._recover(replace(wanted, full=()))
        self._job = left
        self._say(f"[odyssey] rank(s) {full} have run out of memory and are left out: {error}")
        if dead:
            self._report(reactions.deaths(self._job, dead, deaths))
        if not self._job.cluster.ranks:
            return self._stop(stop(self._job, f"all ranks have run out of memory: {error}", 1))
        return self._recover(Recover(dead=tuple(sorted({*wanted.dead, *dead})), why="failure"))

    def _hear_out(self) -> None:
        """Wait for further deaths if all so far have the same exit code: ranks that fail by the same mistake end one
        after the other.
        """
        ends_s = time.monotonic() + _ALIKE_S
        while self._job.cluster.ranks and reactions.gone_alike(self._job) and time.monotonic() < ends_s:
            self._job, _ = reactions.bury(self._job, self._events(_TICK_S))

    def _offer(self) -> None:
        """Offer a generation with a better plan, if there is one and the last generation is live."""
        found = self._offers.following(self._job, self._learning.diagnosis, time.monotonic())
        if found is None:
            return
        self._job, proposal, took_s = found
        if proposal is not None:
            self._say_what_comes_back(proposal)
            self._publish(
                reactions.offered(
                    self._job, proposal.plan, proposal.why, decide_s=took_s, leaving=proposal.leaving
                ),
                proposal.rows,
            )

    def _say_what_comes_back(self, proposal: NextPlan) -> None:
        """Tell the agents which ranks of the leaving cells are to come back, before any rank of a cell leaves."""
        cluster = self._job.cluster
        known = dict(cluster.incarnations)
        for worker in proposal.leaving if cluster.cell_size > 1 else ():
            ranks = cluster.workers[worker].ranks
            wanted = ComesBack(
                generation=cluster.newest + 1,
                incarnations=tuple(known.get(rank, 0) for rank in ranks),
                without=proposal.without.get(worker, ()),
            )
            self._control.put(keys.comes_back_key(worker), to_json(wanted))

    def _finish(self, finished: Finished) -> JobVerdict:
        """Tell the members that all have finished, and wait for their exit codes."""
        cluster = self._job.cluster
        members, exits = {*cluster.ranks, *cluster.finished}, dict(self._job.exits)
        self._send(finished)
        self._offers.close()
        self._planner.finish(self._learning.observations())
        says_s = time.monotonic() + _WAITS_S
        while waits := members - set(exits):
            if time.monotonic() > says_s:
                self._say(f"[odyssey] all steps are trained; rank(s) {sorted(waits)} have not ended yet.")
                says_s += _WAITS_S
            for event in self._incident():
                if isinstance(event, RankDied):
                    if event.incarnation == cluster.incarnation_of(event.rank):
                        exits[event.rank] = event.code
                elif isinstance(event, NodeLost):
                    exits = dict.fromkeys(self._job.ranks_on(event.node), -9) | exits
        self._job = replace(self._job, exits=exits)
        cut_short = [rank for rank in members if not self._control.has([keys.left_key(rank)])]
        return after_training(
            {rank: exits[rank] for rank in sorted(members)},
            cut_short,
            refused=self._refused(),
            ended_behind=self._job.early,
            because=self._departures.ends,
        )

    def _stop(self, told: Stop) -> JobVerdict:
        """Tell the members to stop, and return the verdict."""
        self._send(told)
        return JobVerdict(code=told.code, why=told.why, grace_s=_STOP_GRACE_S)

    # -- publishing -----------------------------------------------------------------------------------

    def _publish(self, made: tuple[JobState, Generation], rows: tuple[CandidateRow, ...]) -> None:
        self._job, generation = made
        check_units(generation, self._cell)
        self._send(generation)
        plan = generation.plan
        self._journal.event(
            "decision",
            generation=generation.number,
            echo=generation.number > 1,
            dead=list(generation.dead),
            why=generation.why,
            policy=plan.policy,
            plan_hash=generation.plan_hash,
            candidates=to_jsonable(rows),
            decide_s=generation.decide_s,
            planned=generation.planned,
            schedule=plan.schedule_text,
            layout=to_jsonable(plan.layout),
            cell_size=self._job.cluster.cell_size,
            shapes=generation.shapes,
        )
        if rows:
            self._say(candidates_table(rows))

    def _send(self, message: Message) -> None:
        generations.send(message, self._job.cluster.cell_size, self._control)

    # -- events ---------------------------------------------------------------------------------------

    def _refused(self) -> str:
        return self._control.peek(keys.REFUSED) or ""

    def _incident(self) -> Sequence[Event]:
        """Return the events of the next incident; none if nothing happens within a tick."""
        if (current := self._job.known_plan) is not None:
            self._learning.look(self._job.cluster, current)
        events = self._events(_TICK_S)
        if events:
            time.sleep(_COALESCE_S)
            events += self._events(0.0)
        return events

    def _events(self, timeout_s: float) -> list[Event]:
        found, self._unheard = self._unheard, []
        for event in self._queue.take(0.0 if found else timeout_s):
            if isinstance(event, str):
                _log.warning("dropped a malformed event: %s", event)
            else:
                found.append(replace(event, t_s=time.monotonic()) if isinstance(event, RankDied) else event)
        if self._control.said(keys.VERDICT):
            raise _EndedElsewhere
        # Losses of nodes come first: a node that is replaced was lost before the ranks in its place could join.
        return [*self._lost_nodes(), *found]

    def _lost_with_ranks(self, events: Sequence[Event]) -> list[int]:
        """Return the nodes that are lost by ``events``, and had living ranks."""
        lost, living = [one.node for one in events if isinstance(one, NodeLost)], {*self._job.cluster.ranks}
        return [node for node in lost if living.intersection(self._job.ranks_on(node))]

    def _lost_nodes(self) -> list[Event]:
        lost = self._leases.expired(time.monotonic())
        nodes = self._lost_with_ranks(lost)
        if nodes:
            what = f"nothing has been heard of node(s) {', '.join(map(str, nodes))} for a while"
            self._say(
                f"[odyssey] {what} (--odyssey-node-lease-s): dead, cut off, or stopped. Their ranks are out."
            )
        return [*lost]
