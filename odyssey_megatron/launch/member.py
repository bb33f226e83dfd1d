"""``Member``: a rank's side of the control plane. It hears of generations, and reports to the coordinator."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell, ParallelSizes
from odyssey_megatron.cluster.events import Ask, GenerationLive, OfferFailed, RankFinished, RankJoined, Retry
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import (
    ConfigError,
    ControlPlaneLost,
    Fenced,
    Superseded,
    Unsound,
)
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch import environment, generations
from odyssey_megatron.launch.alike import end_if_shared
from odyssey_megatron.launch.attention import Attention
from odyssey_megatron.launch.company import Company
from odyssey_megatron.launch.control import Control
from odyssey_megatron.launch.entering import Entering, concerns
from odyssey_megatron.launch.falling import PATIENCE_S, fallen_everywhere
from odyssey_megatron.launch.heartbeat import Heartbeat
from odyssey_megatron.launch.signals import leave_to_agent
from odyssey_megatron.launch.starting import Starting
from odyssey_megatron.launch.watch import Watch
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.generation import Finished, Generation
from odyssey_megatron.plan.layout import Layout


class Member:
    """This process as a member of the job.

    Two threads: one beats a slot of shared memory that the agent reads, as long as the main thread gets on
    (``attention.py``), one waits for generations (``watch.py``). All
    methods are for the main thread. Methods that talk to the store raise ControlPlaneLost when it is gone.

    Args:
        watch: a second connection, for the generations.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        control: Control,
        watch: Control,
        config: OdysseyConfig,
        incarnation: int = 0,
        each: int = 1,
        heartbeat: Heartbeat | None = None,
        journal: Journal | None = None,
    ):
        self.rank, self.world_size, self.incarnation, self.journal = rank, world_size, incarnation, journal
        self.each = each
        """Places of a whole cell that it fills, as its agent has it: see ``Cell``."""
        self.agreed_s: float | None = None
        """When the members of its generation had agreed on how far they are, on its own clock."""
        self._control, self._heartbeat = control, heartbeat
        self._on_offer: Callable[[Generation], None] = lambda offered: None
        self._watcher_control = watch
        self._attention = Attention(config.op_timeout_s, config.recovery_timeout_s, time.monotonic())
        self._leaves, self._overdue = False, 0
        """The last generation that was asked to end as this rank's main thread does not get on."""
        self._watch = Watch(
            watch,
            self._hear_offer,
            self._attention,
            fallen_everywhere=lambda number, text: fallen_everywhere(rank, number, text, watch),
            alone_s=config.node_lease_s + PATIENCE_S,
            settled=not self.joins,
        )
        self.starting = Starting(
            rank=rank,
            world_size=world_size,
            incarnation=incarnation,
            control=control,
            watch=self._watch,
            timeout_s=config.store_timeout_s,
        )
        self.company = Company(
            rank=rank, incarnation=incarnation, each=each, control=control, watch=self._watch
        )
        self._entering = Entering(
            rank=rank,
            incarnation=incarnation,
            control=control,
            watch=self._watch,
            ask_retry=self.ask_retry,
            fenced=self._note_fenced,
            first_within_s=config.store_timeout_s,
            next_within_s=config.recovery_timeout_s,
        )
        if not self.joins:
            self._watch.start()
        if heartbeat is not None:
            heartbeat.may_beat = self._gets_on

    @property
    def joins(self) -> bool:
        """Whether this process takes the place of one that has died, in a job that runs."""
        return self.incarnation > 0

    @property
    def left_alone(self) -> bool:
        """Whether this process has lost another one of its cell before it held anything."""
        return isinstance(self._watch.lost, Fenced)

    def cell(self, sizes: ParallelSizes) -> Cell:
        """This rank's, in a job of these sizes: smaller than others if it has lost ranks for good."""
        return Cell.in_job(self.rank, sizes).smaller(self.each)

    @property
    def heard_s(self) -> float:
        """When this rank heard of the newest generation, on its own clock."""
        return self._watch.heard_s

    def join(self) -> None:
        """A new process in the place of a dead rank: says that it is ready, and follows the generations from here on.

        Everything that takes time should be done by now, since the others will wait for this rank in their steps.

        Raises:
            Fenced: the rank is alive, or its node was asked to leave meanwhile.
        """
        node = int(os.environ.get("GROUP_RANK", "0"))
        if self._watch.lost is not None:
            raise self._watch.lost
        self._control.send(
            RankJoined(rank=self.rank, node=node, incarnation=self.incarnation, each=self.each)
        )
        answer = keys.welcome_key(self.rank, self.incarnation)
        self.starting.wait([answer], "the coordinator has not welcomed it")
        text = self._control.get(answer)
        self._control.forget(answer)  # each process has its own: the store must not grow with them (I10)
        if text == keys.NOT_WELCOME:
            raise Fenced(f"rank {self.rank} is alive, so no other process can take its place")
        self._watch.start(int(text))

    @classmethod
    def connect(cls, config: OdysseyConfig, *, journal: Journal | None = None) -> Member:
        """Joins the job that started this process. Raises ConfigError if ``odyssey run`` did not."""
        env = environment.of_rank()
        environment.die_with(int(env["ODYSSEY_PARENT_PID"]))
        host, port, token = env["MASTER_ADDR"], int(env["MASTER_PORT"]), env["ODYSSEY_TOKEN"]
        rank, incarnation = int(env["RANK"]), int(env.get("ODYSSEY_INCARNATION", "0"))
        each = int(env.get("ODYSSEY_PLACES", "1"))
        # The first sign of life before the connects: from here on the agent notices a hang.
        heartbeat = Heartbeat(env["ODYSSEY_HEARTBEAT"], int(env["ODYSSEY_SLOT"]), config.heartbeat_s)
        if env.get("ODYSSEY_ON_SIGTERM") in ("save", "leave"):
            leave_to_agent(lambda: heartbeat.asked)
        control, watch = (
            Control.connect(
                host,
                port,
                token,
                timeout_s=config.store_timeout_s,
                lease_s=config.node_lease_s,
                writer=f"rank{rank}",
                incarnation=incarnation,
            )
            for _ in range(2)
        )
        return cls(
            rank=rank,
            world_size=int(env["WORLD_SIZE"]),
            control=control,
            watch=watch,
            config=config,
            incarnation=incarnation,
            each=each,
            heartbeat=heartbeat,
            journal=journal,
        )

    @property
    def asked(self) -> Ask:
        """What this node's agent, which was sent a signal, wants of its ranks. Reads memory."""
        return Ask.NOTHING if self._heartbeat is None else self._heartbeat.asked

    @property
    def store(self) -> dist.Store:
        """The raw store under the job's prefix, for the addresses of groups."""
        return self._control.store

    def refuse(self, error: ConfigError | Unsound) -> NoReturn:
        """Ends this rank, and the job. The launcher prints one rank's message, once."""
        if self._watch.settled:
            self._control.put_first(keys.REFUSED, str(error))
        else:  # a rank that would join: the others do without it
            sys.stderr.write(f"[odyssey] rank {self.rank} cannot join: {error}\n")
        raise SystemExit(error.exit_code)

    def fail(self, error: Exception) -> None:
        """Before this rank ends by an exception of its own: does not return if others have it, too."""
        number, _ = self._watch.newest()
        end_if_shared(self._control, error, rank=self.rank, generation=number, history=self._watch.history)

    def excused(self) -> contextlib.AbstractContextManager[None]:
        """In the body this rank is not taken for hung: for compiled code that keeps the GIL. Its death is noticed."""
        return contextlib.nullcontext() if self._heartbeat is None else self._heartbeat.excused()

    # -- generations ----------------------------------------------------------------------------------

    def newer_than(self, number: int) -> bool:
        """Whether a generation after ``number`` exists (or the control plane is lost). Reads a variable."""
        return self._watch.newer_than(number)

    def look(self, number: int) -> bool:
        """As :meth:`newer_than`, before each instruction of a step in generation ``number``, by which others see that
        this thread gets on.
        """
        self._attention.look(number, time.monotonic())
        return self._watch.newer_than(number)

    def rest(self, *, behind_step: bool) -> None:
        """This thread does other things from now on, for as long as nobody waits for it. ``behind_step``: it is through
        with one.
        """
        self._attention.rest(behind_step=behind_step)

    def wait_up_to(self, op_timeout_s: float) -> None:
        """So long one instruction may take, and messages are waited for: it is not what the launch line said."""
        self._attention.op_timeout_s = op_timeout_s

    def on_newer(
        self, number: int, end: Callable[[bool], None], fall: Callable[[], None] | None = None
    ) -> None:
        """Has the watcher call ``end`` when generation ``number`` ends, *before* anyone here can see a newer one.

        Also called when the control plane is lost.

        Args:
            end: hears whether all who go on knew by then that nothing more of it counts (``falling.py``).
            fall: is called first, and says so here; None where whoever waits hears of the end.
        """
        self._watch.on_newer(number, end, fall)

    def await_newer(self, number: int, why: str) -> None:
        """Until there is a generation after ``number``, which is asked for, as this rank cannot go on in that one. One
        that holds nothing yet does not wait. Raises ControlPlaneLost if none comes.
        """
        if self._watch.settled:
            self._entering.await_newer(number, why)

    def forget(self, number: int) -> None:
        """Nothing is to be called any more when generation ``number`` ends."""
        self._watch.forget(number)

    def on_offer(self, callback: Callable[[Generation], None]) -> None:
        """Makes the watcher call ``callback`` for each generation that is offered from now on."""
        self._on_offer = callback

    def take_offer(self, number: int) -> None:
        """This rank enters offered generation ``number``, unless a newer one has ended it."""
        self._watch.take_offer(number)

    def next_generation(self, after: int, timeout_s: float | None = None, *, why: str = "") -> Generation:
        """Blocks for the newest generation after ``after``, asking for one if none comes soon.

        Args:
            after: the last generation this rank was in; 0 before the first.
            timeout_s: default ``recovery_timeout_s``; ``store_timeout_s`` for the first. A rank that joins waits
                for as long as it takes.
            why: what the coordinator hears if it has to be asked.

        Raises:
            Fenced: the others go on without this rank (I8), or have finished.
            JobStopped: the job cannot go on.
            ControlPlaneLost: also if no generation came in time.
        """
        return self._entering.next_generation(after, timeout_s, why=why)

    def meet(self, generation: Generation) -> None:
        """This rank is in the groups of a ``generation`` that begins between two steps, and so are the others when it
        returns, or about to be. Raises Superseded.
        """
        if self.rank in generation.fresh:
            self._entering.await_others(generation.number)
        elif generation.fresh:
            self._entering.let_in(generation)

    def with_all_routes(self, number: int, layout: Layout) -> Layout:
        """``layout`` of generation ``number``, which this rank is in, with the ways that all microbatches go.

        Raises:
            Superseded: it has ended.
        """
        return generations.with_all_routes(self._control, number, layout)

    def _gets_on(self) -> bool:
        """In the heartbeat's thread: False ends this process, whose main thread is stuck."""
        if self.asked == Ask.LEAVE and not self._watch.settled and not self._leaves:
            self._leaves = True
            self._beside(self._leave_while_waiting)
        now_s = time.monotonic()
        if (overdue := self._attention.overdue(now_s)) > self._overdue:
            self._overdue = overdue
            reason = f"one instruction has taken longer than {self._attention.limit_s:g} s there"
            self._beside(lambda: self._ask_for_others(overdue, reason))
        return not self._attention.is_lost(now_s)

    @staticmethod
    def _beside(work: Callable[[], None]) -> None:
        """In a thread: the store may be what does not answer, and the one that beats has to."""
        with contextlib.suppress(RuntimeError):  # this process ends
            threading.Thread(target=work, name="odyssey-attention", daemon=True).start()

    def _leave_while_waiting(self) -> None:
        self._watch.end(Fenced(f"the node of rank {self.rank} was asked to leave the job"))

    def _ask_for_others(self, number: int, reason: str) -> None:
        with contextlib.suppress(ControlPlaneLost):
            self.ask_retry(number, reason)

    def _hear_offer(self, text: str) -> None:
        """In the watcher's thread."""
        offered = generations.read(text, self.rank, self._watcher_control)
        if isinstance(offered, Generation) and concerns(offered, self.rank, self.incarnation):
            self._on_offer(offered)

    def _note_fenced(self, number: int, why: str) -> None:
        if self.journal:
            self.journal.event("fenced", generation=number, why=why)

    # -- reports --------------------------------------------------------------------------------------

    def report_live(self, number: int, done: int = 0) -> None:
        """Says that this rank holds all its state of generation ``number``. Returns once on record. ``done``: pieces
        of common work so far, by which the coordinator sees that the job gets on.
        """
        self._watch.settled = True
        ago_s = None if self.agreed_s is None else time.monotonic() - self.agreed_s
        live = GenerationLive(rank=self.rank, generation=number, done=done, agreed_ago_s=ago_s)
        self._control.send(live, acknowledged=True)

    def decline(self, number: int, reason: str) -> None:
        """This rank cannot prepare offered generation ``number``."""
        self._control.send(OfferFailed(rank=self.rank, generation=number, reason=reason))

    def ask_retry(self, number: int, reason: str) -> None:
        """Asks for fresh groups, although nobody may have died. Ignored once ``number`` is outdated."""
        patience_s = self._attention.longest_s
        self._control.send(Retry(rank=self.rank, generation=number, reason=reason, patience_s=patience_s))

    def note(self, name: str, value: str) -> None:
        """Leaves ``value`` for whoever takes over a task of this rank's."""
        self._control.put(f"note/{name}", value)

    def noted(self, name: str) -> str | None:
        """The newest value left under ``name``, if there is one."""
        return self._control.peek(f"note/{name}")

    def publish_observations(self, observations_json: str) -> None:
        """Replaces what the coordinator knows of this rank's measured costs when it next decides."""
        self._control.put(keys.observations_key(self.rank), observations_json)

    def finish(self, number: int, early: int = -1) -> None:
        """Call after the last step: returns when every member of generation ``number`` got here. ``early``: after so
        many, as the job was asked to end; -1: after all.

        Raises:
            Superseded: somebody died first, and the others may need this rank to finish their step.
        """
        self.report_live(number)
        self._control.send(RankFinished(rank=self.rank, generation=number, early=early))
        self._watch.await_newer(number, None)
        newest, text = self._watch.newest()
        if not isinstance(generations.read(text, self.rank, self._control), Finished):
            raise Superseded(f"generation {newest} came while rank {self.rank} was finishing")
        # What the script still does may be what the training was for: it has not left before its end.
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.leave()
        with contextlib.suppress(ControlPlaneLost):
            self._control.put(keys.left_key(self.rank), "")
