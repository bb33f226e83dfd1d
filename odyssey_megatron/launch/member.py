"""``Member``: a rank's side of the control plane. It receives generations, and reports to the coordinator."""

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

    It runs two threads. One writes heartbeats into a slot of shared memory that the agent reads, as long as the
    main thread makes progress (``attention.py``). The other waits for generations (``watch.py``). All public
    methods are to be called by the main thread. Methods that talk to the store raise ControlPlaneLost when it is
    gone.

    Args:
        watch: A second connection, on which the thread waits for generations.
        each: The number of places of a whole cell that this rank fills.
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
        """Number of places of a whole cell that this rank fills, as its agent has set it: see ``Cell``."""
        self.agreed_s: float | None = None
        """When the members of its generation had agreed on how far they are, by this rank's clock."""
        self._control, self._heartbeat = control, heartbeat
        self._on_offer: Callable[[Generation], None] = lambda offered: None
        self._watcher_control = watch
        self._attention = Attention(config.op_timeout_s, config.recovery_timeout_s, time.monotonic())
        self._leaves, self._overdue = False, 0
        """The last generation for which this rank asked the others to go on, as its own main thread is stuck."""
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
        """Whether this process takes the place of a dead one in a running job."""
        return self.incarnation > 0

    @property
    def left_alone(self) -> bool:
        """Whether this process was fenced before it held anything, e.g. as another rank of its cell was lost."""
        return isinstance(self._watch.lost, Fenced)

    def cell(self, sizes: ParallelSizes) -> Cell:
        """Return this rank's cell in a job of these sizes: a smaller cell if it has lost ranks for good."""
        return Cell.in_job(self.rank, sizes).smaller(self.each)

    @property
    def heard_s(self) -> float:
        """When this rank heard of the newest generation, by its own clock."""
        return self._watch.heard_s

    def join(self) -> None:
        """Tell the coordinator that this process is ready to take the place of a dead rank, and wait to be welcomed.

        From then on it follows the generations. Everything that takes time should be done before, as the others will
        wait for this rank in their steps.

        Raises:
            Fenced: The rank is alive, or its node was asked to leave meanwhile.
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
        self._control.forget(answer)  # one key per process: the store must not grow with them (I10)
        if text == keys.NOT_WELCOME:
            raise Fenced(f"rank {self.rank} is alive, so no other process can take its place")
        self._watch.start(int(text))

    @classmethod
    def connect(cls, config: OdysseyConfig, *, journal: Journal | None = None) -> Member:
        """Join the job that started this process. Raises ConfigError if ``odyssey run`` did not start it."""
        env = environment.of_rank()
        environment.die_with(int(env["ODYSSEY_PARENT_PID"]))
        host, port, token = env["MASTER_ADDR"], int(env["MASTER_PORT"]), env["ODYSSEY_TOKEN"]
        rank, incarnation = int(env["RANK"]), int(env.get("ODYSSEY_INCARNATION", "0"))
        each = int(env.get("ODYSSEY_PLACES", "1"))
        # The first sign of life comes before connecting: from here on the agent notices a hang.
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
        """What this node's agent asks of its ranks after it was sent a signal. Only reads memory."""
        return Ask.NOTHING if self._heartbeat is None else self._heartbeat.asked

    @property
    def store(self) -> dist.Store:
        """The raw store under the job's prefix, through which process groups exchange their addresses."""
        return self._control.store

    def refuse(self, error: ConfigError | Unsound) -> NoReturn:
        """End this rank, and the job unless this rank was only joining it. The launcher prints one rank's message,
        once.
        """
        if self._watch.settled:
            self._control.put_first(keys.REFUSED, str(error))
        else:  # it was only joining: the others go on without it
            sys.stderr.write(f"[odyssey] rank {self.rank} cannot join: {error}\n")
        raise SystemExit(error.exit_code)

    def fail(self, error: Exception) -> None:
        """To be called before this rank ends by an exception; does not return if other ranks have the same one."""
        number, _ = self._watch.newest()
        end_if_shared(self._control, error, rank=self.rank, generation=number, history=self._watch.history)

    def excused(self) -> contextlib.AbstractContextManager[None]:
        """In the body, silence is not taken for a hang: for code that keeps the GIL. Death is still noticed."""
        return contextlib.nullcontext() if self._heartbeat is None else self._heartbeat.excused()

    # -- generations ----------------------------------------------------------------------------------

    def newer_than(self, number: int) -> bool:
        """Whether a generation after ``number`` exists (or the control plane is lost). Only reads a variable."""
        return self._watch.newer_than(number)

    def look(self, number: int) -> bool:
        """:meth:`newer_than`, to be called before each instruction of a step in generation ``number``: other threads
        see by it that this one makes progress.
        """
        self._attention.look(number, time.monotonic())
        return self._watch.newer_than(number)

    def rest(self, *, behind_step: bool) -> None:
        """Say that this thread does other things from now on, and that nobody waits for it.

        Args:
            behind_step: Whether it has just completed a step.
        """
        self._attention.rest(behind_step=behind_step)

    def wait_up_to(self, op_timeout_s: float) -> None:
        """Change how long one instruction may take, and a message is waited for, from what the launch line said."""
        self._attention.op_timeout_s = op_timeout_s

    def on_newer(
        self, number: int, end: Callable[[bool], None], fall: Callable[[], None] | None = None
    ) -> None:
        """Have the watcher call ``end`` when generation ``number`` ends, *before* this process can see a newer one.

        It is also called when the control plane is lost.

        Args:
            end: Is told whether all ranks that go on knew by then that nothing more of this generation counts
                (``falling.py``).
            fall: Is called before ``end``, and makes that known in this process. None if waiting threads notice
                the end by themselves.
        """
        self._watch.on_newer(number, end, fall)

    def await_newer(self, number: int, why: str) -> None:
        """Wait for a generation after ``number``, in which this rank cannot go on, and ask for one if none comes soon.

        A rank that holds nothing yet does not wait. Raises ControlPlaneLost if no generation comes.
        """
        if self._watch.settled:
            self._entering.await_newer(number, why)

    def forget(self, number: int) -> None:
        """Withdraw what :meth:`on_newer` has registered for the end of generation ``number``."""
        self._watch.forget(number)

    def on_offer(self, callback: Callable[[Generation], None]) -> None:
        """Have the watcher call ``callback`` for each generation that is offered from now on."""
        self._on_offer = callback

    def take_offer(self, number: int) -> None:
        """Enter offered generation ``number``, unless a newer one has ended it."""
        self._watch.take_offer(number)

    def next_generation(self, after: int, timeout_s: float | None = None, *, why: str = "") -> Generation:
        """Block until there is a generation after ``after``, and return the newest; ask for one if none comes soon.

        Args:
            after: The last generation this rank was in; 0 before the first.
            timeout_s: By default ``recovery_timeout_s``, or ``store_timeout_s`` for the first generation. A rank
                that joins waits for as long as it takes.
            why: The reason given to the coordinator if it has to be asked.

        Raises:
            Fenced: The others go on without this rank (I8), or have finished.
            JobStopped: The job cannot go on.
            ControlPlaneLost: The store is gone, or no generation came in time.
        """
        return self._entering.next_generation(after, timeout_s, why=why)

    def meet(self, generation: Generation) -> None:
        """Wait, as a fresh rank, until the others have entered ``generation``; as another rank, let fresh ones go on.

        To be called once this rank has built its groups for a generation that begins between two steps. When it
        returns, the other ranks have entered the generation or are about to. Raises Superseded if it has ended.
        """
        if self.rank in generation.fresh:
            self._entering.await_others(generation.number)
        elif generation.fresh:
            self._entering.let_in(generation)

    def with_all_routes(self, number: int, layout: Layout) -> Layout:
        """Return ``layout``, that of this rank's generation ``number``, with the routes of all microbatches.

        Raises:
            Superseded: The generation has ended.
        """
        return generations.with_all_routes(self._control, number, layout)

    def _gets_on(self) -> bool:
        """Whether the heartbeat's thread, which calls this, is to go on; False ends this process: it is stuck."""
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
        """Run ``work`` in a thread of its own: the store may not answer, and the heartbeat must go on meanwhile."""
        with contextlib.suppress(RuntimeError):  # this process ends
            threading.Thread(target=work, name="odyssey-attention", daemon=True).start()

    def _leave_while_waiting(self) -> None:
        self._watch.end(Fenced(f"the node of rank {self.rank} was asked to leave the job"))

    def _ask_for_others(self, number: int, reason: str) -> None:
        with contextlib.suppress(ControlPlaneLost):
            self.ask_retry(number, reason)

    def _hear_offer(self, text: str) -> None:
        """Pass an offered generation on, in the watcher's thread."""
        offered = generations.read(text, self.rank, self._watcher_control)
        if isinstance(offered, Generation) and concerns(offered, self.rank, self.incarnation):
            self._on_offer(offered)

    def _note_fenced(self, number: int, why: str) -> None:
        if self.journal:
            self.journal.event("fenced", generation=number, why=why)

    # -- reports --------------------------------------------------------------------------------------

    def report_live(self, number: int, done: int = 0) -> None:
        """Report that this rank holds all its state of generation ``number``; return once that is on record.

        Args:
            done: The number of pieces of common work done so far, by which the coordinator sees that the job makes
                progress.
        """
        self._watch.settled = True
        ago_s = None if self.agreed_s is None else time.monotonic() - self.agreed_s
        live = GenerationLive(rank=self.rank, generation=number, done=done, agreed_ago_s=ago_s)
        self._control.send(live, acknowledged=True)

    def decline(self, number: int, reason: str) -> None:
        """Report that this rank cannot prepare offered generation ``number``."""
        self._control.send(OfferFailed(rank=self.rank, generation=number, reason=reason))

    def ask_retry(self, number: int, reason: str) -> None:
        """Ask for a generation with fresh groups, even if nobody has died. Ignored once ``number`` is outdated."""
        patience_s = self._attention.longest_s
        self._control.send(Retry(rank=self.rank, generation=number, reason=reason, patience_s=patience_s))

    def note(self, name: str, value: str) -> None:
        """Leave ``value`` in the store for the rank that may take over a task of this one."""
        self._control.put(f"note/{name}", value)

    def noted(self, name: str) -> str | None:
        """Return the newest value left under ``name``, if there is one."""
        return self._control.peek(f"note/{name}")

    def publish_observations(self, observations_json: str) -> None:
        """Replace the measured costs of this rank that the coordinator uses when it next decides."""
        self._control.put(keys.observations_key(self.rank), observations_json)

    def finish(self, number: int, early: int = -1) -> None:
        """Wait, after the last step, until every member of generation ``number`` has called this.

        Args:
            early: The number of steps done, if the job was asked to end before all were; else -1.

        Raises:
            Superseded: A rank died first, and the others may need this rank to finish their step.
        """
        self.report_live(number)
        self._control.send(RankFinished(rank=self.rank, generation=number, early=early))
        self._watch.await_newer(number, None)
        newest, text = self._watch.newest()
        if not isinstance(generations.read(text, self.rank, self._control), Finished):
            raise Superseded(f"generation {newest} came while rank {self.rank} was finishing")
        # The script may still do what the training was for, so this rank leaves only when the script ends.
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.leave()
        with contextlib.suppress(ControlPlaneLost):
            self._control.put(keys.left_key(self.rank), "")
