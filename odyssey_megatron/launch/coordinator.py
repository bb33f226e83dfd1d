"""The coordinator: the only writer of membership, generations and plans. It is a thread in the job's host.

It reads one queue of events, lets ``reactions.py`` say what follows from them, and does that: it asks the planner,
publishes generations, answers ranks that join, and ends the job.
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

from odyssey_megatron.cluster.events import Event, GenerationLive, NodeLost, RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import initial_state, without_fresh
from odyssey_megatron.codec import from_json, to_json, to_jsonable
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import (
    EXIT_BAD_INPUT,
    EXIT_LAYERS_LOST,
    ConfigError,
    ControlPlaneLost,
    LayersLost,
    OdysseyError,
)
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch import generations, reactions
from odyssey_megatron.launch.control import Control, EventReader
from odyssey_megatron.launch.learning import Learning
from odyssey_megatron.launch.leases import Leases
from odyssey_megatron.launch.offers import Offers, Proposal
from odyssey_megatron.launch.places import ComesBack
from odyssey_megatron.launch.planner import Planner
from odyssey_megatron.launch.reactions import Action, Answer, Forget, JobState, Recover, Report, stop
from odyssey_megatron.launch.rebalancing import Rebalancing
from odyssey_megatron.launch.replacing import Replacing
from odyssey_megatron.launch.verdict import Verdict, after_training, before_training, by_signal
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.generation import CandidateRow, Finished, Generation, Message, Stop
from odyssey_megatron.plan.spread import on_one_node, spread
from odyssey_megatron.policy.table import candidates_table

_log = logging.getLogger(__name__)

_COALESCE_S = 0.003
"""Deaths of one incident reach the queue within this time of each other, and get one generation for all of them."""
_TICK_S = 0.1
_ALIKE_S = 3.0
"""The time within which all ranks that end by the same mistake have ended, even on a busy machine."""
_WAITS_S = 60.0
"""How often the user is told which ranks the job waits for after its last step. There is no limit to that wait, as what
they still write may be what the job was for.
"""
_STOP_GRACE_S = 1.5
"""How long ranks may take to leave by themselves after a stop. Then they are told to (``verdict.ENDS_S``)."""


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Return a context without garbage collection, for decisions that the job waits for.

    Searching a large plan for garbage again and again takes as long as making it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Coordinator:
    """Coordinates one job, from its ranks' first messages to the verdict.

    Args:
        nodes: The node of each rank.
        say: Shows a text to the user.
        here: The node on which this runs. None: a host without ranks.
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
    ):
        self._control, self._queue, self._planner = control, events, planner
        self._journal, self._say = journal, say
        self._observes = config.mode == "observe"
        self._world_size = len(nodes)
        of_rank = tuple(nodes[rank] for rank in sorted(nodes))
        self._job = JobState(cluster=initial_state(nodes=of_rank, started_s=time.monotonic()), nodes=of_rank)
        self._leases = Leases(control, sorted(set(of_rank) - {here}), config.node_lease_s, here=here)
        self._learning = Learning(planner, control, self._world_size)
        acts = config.rebalance == "auto"
        self._offers = Offers(
            planner,
            Rebalancing(planner, journal, say, acts=acts, seeks=config.layout == "auto"),
            Replacing(planner, journal, say, acts=acts, restarts=config.respawn > 0),
        )
        self._unheard: list[Event] = []
        self._agreed = 0
        """The number of the newest generation that is known to have begun with an agreement."""

    def run(self) -> Verdict | None:
        """Coordinate the job until it ends, then publish the verdict and return it. None if the store is gone."""
        gc.freeze()  # imported modules stay anyway, and a search through all of them delays a decision by 0.1 s
        try:
            verdict = self._await_job() or (
                self._observe() if self._observes else self._start() or self._train()
            )
        except ControlPlaneLost:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, agents and ranks must hear of an end
            self._say(traceback.format_exc())
            verdict = Verdict(code=1, why=f"the coordinator failed: {error!r}. Please report this.")
        finally:
            self._learning.close()
        verdict = by_signal(verdict, self._job.exits)
        self._journal.event("job_finished", verdict=verdict.why or "done", exit_code=verdict.code)
        if verdict.why:
            self._say(f"[odyssey] {verdict.why}")
        verdict = replace(verdict, nodes=tuple(self._leases.nodes))
        self._control.put(keys.VERDICT, to_json(verdict))
        return verdict

    # -- before training ------------------------------------------------------------------------------

    def _await_job(self) -> Verdict | None:
        """Wait until all ranks have posted the job. Returns a verdict if one of them ends first."""
        posted = [keys.digest_key(rank) for rank in range(self._world_size)]
        while not self._control.has(posted):
            found = self._events(_TICK_S / 2)
            if found and self._control.has(posted):
                # Ranks that have died since then have died in a running job. Their agents saw it so, too.
                self._unheard = found
                return None
            for event in found:
                if isinstance(event, NodeLost):
                    return Verdict(code=1, why=f"node {event.node} was lost before training started.")
                if isinstance(event, RankDied):
                    exits = {**self._job.exits, event.rank: event.code}
                    self._job = replace(self._job, exits=exits)
                    if verdict := before_training(event.rank, exits, self._world_size, self._refused()):
                        return verdict
        return None

    def _start(self) -> Verdict | None:
        began_s, job = time.monotonic(), self._job
        try:
            posted = json.loads(self._control.get(keys.JOB))
            spec = from_json(JobSpec, posted["job"])
            spec.check(self._world_size)
            cluster = initial_state(
                nodes=job.nodes,
                started_s=job.cluster.started_s,
                cell_size=spec.cell_size,
                context=spec.alike_ranks,
            )
            self._job = job = replace(job, cluster=cluster)
            decided = self._planner.start(spec, cluster, posted["profile"])
        except (OdysseyError, ValueError) as error:
            return self._stop(
                stop(self._job, str(error), EXIT_BAD_INPUT if isinstance(error, ConfigError) else 1)
            )
        layout = decided.plan.layout
        if alone := sorted({layer for layers in layout.alone().values() for layer in layers}):
            self._say(
                f"[odyssey] one rank or cell alone has {layer_names(alone, layout.num_layers)}: losing it ends the "
                f"job, exit code {EXIT_LAYERS_LOST}. --odyssey-redundancy state or more data parallelism survives."
            )
        elif fatal := on_one_node(layout, cluster.nodes):
            helps = spread(layout, cluster.nodes, spec.optimizer_copies) is not layout
            self._say(
                f"[odyssey] node(s) {', '.join(map(str, fatal))}: all replicas of some layers are on one. Losing it "
                f"ends the job, exit code {EXIT_LAYERS_LOST}."
                + " --odyssey-layout spread puts replicas on different nodes."
                * helps
            )
        job = replace(job, start_plan=decided.plan)
        decide_s = time.monotonic() - began_s
        self._publish(reactions.published(job, decided.plan, "start", decide_s=decide_s), decided.rows)
        return None

    def _observe(self) -> Verdict:
        """Say what would be done about the first failure, and then end the job as an ordinary launcher does."""
        hopeless = self._start()  # the ranks do not read the generations that are published
        left, dead = set(range(self._world_size)), set[int]()
        while not dead:
            if not left:
                return Verdict(code=0)
            events = self._incident()
            ended = {one.rank for one in events if isinstance(one, RankDied) and one.code == 0}
            deaths = [one for one in events if not (isinstance(one, RankDied) and one.rank in ended)]
            left -= ended
            self._job, dead = reactions.bury(self._job, deaths)
        self._report(reactions.deaths(self._job, dead, deaths))
        verdict = hopeless or self._recover(Recover(dead=tuple(sorted(dead)), why="observed"))
        would = f"stopped: {verdict.why}" if verdict else "gone on as decided above."
        lost = f"the loss of rank(s) {sorted(dead)} ends the job, since --odyssey observe only looks on"
        return Verdict(code=1, why=f"{lost}; --odyssey recover would have {would}")

    # -- training -------------------------------------------------------------------------------------

    def _train(self) -> Verdict:
        while True:
            events = self._incident()
            self._note_agreements(events)
            refused = self._refused() if any(isinstance(one, RankDied) for one in events) else ""
            self._job, actions = reactions.react(self._job, events, now_s=time.monotonic(), refused=refused)
            for action in actions:
                if verdict := self._do(action):
                    return verdict
            self._offer()

    def _note_agreements(self, events: Sequence[Event]) -> None:
        """Record in the journal when generations were agreed on.

        The times are by this host's clock, which the report needs, as there may be no rank here that takes part.
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

    def _do(self, action: Action) -> Verdict | None:
        """Carry out ``action``. Returns a verdict if it ends the job."""
        match action:
            case Report():
                self._report(action)
            case Answer():
                self._answer(action)
            case Forget(number=number):
                self._control.forget_before(number)
            case Recover():
                with _nothing_collected():
                    return self._recover(action)
            case Stop():
                return self._stop(action)
            case Finished():
                return self._finish(action)
            case Verdict():
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
            self._journal.event("rank_joined", generation=newest, echo=True, target=joined.rank)

    def _recover(self, wanted: Recover) -> Verdict | None:
        began_s, job = time.monotonic(), self._job
        known = job.known_plan
        assert known is not None
        self._learning.catch_up()
        try:
            decided = self._planner.decide(without_fresh(job.cluster), known, began_s)
        except LayersLost as error:
            self._hear_out()
            return self._stop(reactions.layers_lost(self._job, error))
        except OdysseyError as error:
            return self._stop(stop(job, f"no plan for the surviving ranks: {error}", 1))
        plan = decided.plan
        self._offers.recovered(decided, job.live_plan)
        if job.live_plan is None:
            # No rank has trained yet. Each initialises its layers, and there is nothing to send.
            plan = replace(plan, transfers=(), transition_s=0.0)
        decide_s = time.monotonic() - began_s
        self._publish(
            reactions.published(job, plan, wanted.why, dead=wanted.dead, decide_s=decide_s), decided.rows
        )
        return None

    def _hear_out(self) -> None:
        """Wait for more deaths while it looks as if all ranks end by the same mistake, one after the other."""
        ends_s = time.monotonic() + _ALIKE_S
        while self._job.cluster.ranks and reactions.gone_alike(self._job) and time.monotonic() < ends_s:
            self._job, _ = reactions.bury(self._job, self._events(_TICK_S))

    def _offer(self) -> None:
        """Offer the next generation, if there is a better plan and the last generation is live."""
        began_s = time.monotonic()
        self._job, proposal = self._offers.following(self._job, self._learning.diagnosis, began_s)
        if proposal is not None:
            decide_s = time.monotonic() - began_s
            self._say_what_comes_back(proposal)
            self._publish(
                reactions.offered(
                    self._job, proposal.plan, proposal.why, decide_s=decide_s, leaving=proposal.leaving
                ),
                proposal.rows,
            )

    def _say_what_comes_back(self, proposal: Proposal) -> None:
        """Tell the agents, before any rank of a cell leaves, without which ranks the cell is to come back."""
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

    def _finish(self, finished: Finished) -> Verdict:
        """Tell the members that all have finished, and wait for their exit codes."""
        cluster = self._job.cluster
        members, exits = {*cluster.ranks, *cluster.finished}, dict(self._job.exits)
        self._send(finished)
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
            {rank: exits[rank] for rank in sorted(members)}, cut_short, ended_behind=self._job.early
        )

    def _stop(self, told: Stop) -> Verdict:
        """Tell the members to stop, and return the verdict."""
        self._send(told)
        return Verdict(code=told.code, why=told.why, grace_s=_STOP_GRACE_S)

    # -- publishing -----------------------------------------------------------------------------------

    def _publish(self, made: tuple[JobState, Generation], rows: tuple[CandidateRow, ...]) -> None:
        self._job, generation = made
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
        """Return the events of the next incident. Empty if nothing has happened for ``_TICK_S``."""
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
        # Lost nodes come first: a node that is replaced must be lost before the ranks that replace its own can join.
        return [*self._leases.expired(time.monotonic()), *found]
