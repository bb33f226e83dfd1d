"""``Member``: a rank's side of the control plane, by which it goes from generation to generation.

What it says on its way is in ``reports.py``, and how its agent sees that it gets on, in ``liveness.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.events import GenerationLive, RankFinished, RankJoined
from odyssey_megatron.cluster.shapes import ParallelSizes
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import (
    ConfigError,
    ControlPlaneLost,
    Fenced,
    Superseded,
    Unsound,
)
from odyssey_megatron.launch.process import printing
from odyssey_megatron.launch.process.heartbeat import Heartbeat
from odyssey_megatron.launch.process.signals import leave_to_agent
from odyssey_megatron.launch.rank import environment
from odyssey_megatron.launch.rank.alike import end_if_shared
from odyssey_megatron.launch.rank.attention import Attention
from odyssey_megatron.launch.rank.company import Company
from odyssey_megatron.launch.rank.entering import Entering, concerns
from odyssey_megatron.launch.rank.falling import PATIENCE_S, fallen_everywhere
from odyssey_megatron.launch.rank.liveness import Liveness
from odyssey_megatron.launch.rank.reports import Reports
from odyssey_megatron.launch.rank.starting import Starting
from odyssey_megatron.launch.rank.watch import Watch
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire import generations
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.sending.generation import Finished, Generation


class Member:
    """This process as a member of the job.

    It has two threads. One writes heartbeats into a slot of shared memory that the agent reads, as long as the main
    thread makes progress (``liveness.py``). The other waits for generations (``watch.py``). All public methods are for
    the main thread. Those that talk to the store raise ControlPlaneLost when it is gone.

    Args:
        control: the main thread's connection to the store.
        watch: a second connection, for the thread that waits for generations.
        size: number of ranks of the smaller cell that this rank is in, as its agent has told it; 0: of a whole one.
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
        size: int = 0,
        heartbeat: Heartbeat | None = None,
        journal: Journal | None = None,
    ):
        self.rank, self.world_size, self.incarnation, self.journal = rank, world_size, incarnation, journal
        self.size = size
        self.agreed_s: float | None = None
        """Time, on this rank's clock, when the members of its generation had agreed on how far they are."""
        self._control = control
        self._on_offer: Callable[[Generation], None] = lambda offered: None
        self._watcher_control = watch
        self._attention = Attention(config.op_timeout_s, config.recovery_timeout_s, time.monotonic())
        self._watch = Watch(
            watch,
            self._hear_offer,
            self._attention,
            fallen_everywhere=lambda number, text: fallen_everywhere(rank, number, text, watch),
            alone_s=config.node_lease_s + PATIENCE_S,
            settled=not self.joins,
        )
        self.reports = Reports(rank=rank, control=control, attention=self._attention)
        self.liveness = Liveness(
            rank=rank,
            heartbeat=heartbeat,
            attention=self._attention,
            watch=self._watch,
            reports=self.reports,
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
            rank=rank, incarnation=incarnation, size=size, control=control, watch=self._watch
        )
        self._entering = Entering(
            rank=rank,
            incarnation=incarnation,
            control=control,
            watch=self._watch,
            ask_retry=self.reports.ask_retry,
            fenced=self._note_fenced,
            first_within_s=config.store_timeout_s,
            next_within_s=config.recovery_timeout_s,
        )
        if not self.joins:
            self._watch.start()

    @property
    def joins(self) -> bool:
        """Whether this process takes the place of one that has died, in a job that runs."""
        return self.incarnation > 0

    @property
    def is_fenced(self) -> bool:
        """Whether this process has been shut out of the job, as when it lost a rank of its cell while it joined."""
        return isinstance(self._watch.lost, Fenced)

    def cell(self, sizes: ParallelSizes) -> Cell:
        """Return this rank's cell in a job of these sizes: a smaller cell if it has lost ranks for good."""
        return Cell.in_job(self.rank, sizes).smaller(self.size)

    @property
    def heard_s(self) -> float:
        """Time, on this rank's clock, when it learned of the newest generation."""
        return self._watch.heard_s

    def join(self) -> None:
        """Report that this process, which replaces a dead rank, is ready, and follow the generations from here on.

        Do everything that takes time before, since the others will wait for this rank in their steps.

        Raises:
            Fenced: the rank is alive, or its node was asked to leave meanwhile.
        """
        node = int(os.environ.get("GROUP_RANK", "0"))
        if self._watch.lost is not None:
            raise self._watch.lost
        self._control.send(
            RankJoined(rank=self.rank, node=node, incarnation=self.incarnation, size=self.size)
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
        """Join the job that started this process. Raises ConfigError if it was not started by ``odyssey run``."""
        env = environment.of_rank()
        environment.die_with(int(env["ODYSSEY_PARENT_PID"]))
        environment.end_without_memory()
        printing.spare()
        host, port, token = env["MASTER_ADDR"], int(env["MASTER_PORT"]), env["ODYSSEY_TOKEN"]
        rank, incarnation = int(env["RANK"]), int(env.get("ODYSSEY_INCARNATION", "0"))
        size = int(env.get("ODYSSEY_CELL_SIZE", "0"))
        # The heartbeat begins before the connections are made: from here on the agent notices a hang.
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
        control.put(keys.CONTACT, "")
        return cls(
            rank=rank,
            world_size=int(env["WORLD_SIZE"]),
            control=control,
            watch=watch,
            config=config,
            incarnation=incarnation,
            size=size,
            heartbeat=heartbeat,
            journal=journal,
        )

    @property
    def store(self) -> dist.Store:
        """The plain store under the job's prefix, through which groups exchange addresses."""
        return self._control.store

    def refuse(self, error: ConfigError | Unsound) -> NoReturn:
        """End this rank because of ``error``, and with it the job. The launcher prints one rank's message, once.

        A rank that has not joined yet ends alone.
        """
        if self._watch.settled:
            self._control.put_first(keys.REFUSED, str(error))
        else:
            sys.stderr.write(f"[odyssey] rank {self.rank} cannot join: {error}\n")
        raise SystemExit(error.exit_code)

    def fail(self, error: Exception) -> None:
        """Call before this rank ends by its own exception. Does not return if other ranks have the same one."""
        number, _ = self._watch.newest()
        end_if_shared(self._control, error, rank=self.rank, generation=number, history=self._watch.history)

    # -- generations ----------------------------------------------------------------------------------

    def newer_than(self, number: int) -> bool:
        """Whether a generation after ``number`` exists, or the control plane is lost. Only reads a variable."""
        return self._watch.newer_than(number)

    def look(self, number: int) -> bool:
        """As :meth:`newer_than`; also note that the main thread makes progress.

        Call it before each instruction of a step in generation ``number``.
        """
        self._attention.look(number, time.monotonic())
        return self._watch.newer_than(number)

    def on_newer(
        self, number: int, end: Callable[[bool], None], fall: Callable[[], None] | None = None
    ) -> None:
        """Have the watcher call ``end`` when generation ``number`` ends, *before* code of this process can see a newer
        one. It is also called when the control plane is lost.

        Args:
            end: is passed whether all ranks that go on knew by then that nothing more of it counts (``falling.py``).
            fall: is called first, to make that known in this process. None if the end itself tells all who wait.
        """
        self._watch.on_newer(number, end, fall)

    def await_newer(self, number: int, why: str) -> None:
        """Ask for a generation after ``number``, in which this rank cannot go on, and wait until there is one.

        A rank that holds nothing yet returns at once. Raises ControlPlaneLost if none comes.
        """
        if self._watch.settled:
            self._entering.await_newer(number, why)

    def forget(self, number: int) -> None:
        """Drop the callbacks of :meth:`on_newer` for generation ``number``."""
        self._watch.forget(number)

    def on_offer(self, callback: Callable[[Generation], None]) -> None:
        """Have the watcher call ``callback`` for each generation that is offered from now on."""
        self._on_offer = callback

    def take_offer(self, number: int) -> None:
        """Enter offered generation ``number``, unless a newer one has ended it."""
        self._watch.take_offer(number)

    def next_generation(self, after: int, timeout_s: float | None = None, *, why: str = "") -> Generation:
        """Wait for the newest generation after ``after``, and ask for one if none comes soon.

        Args:
            after: the last generation this rank was in; 0 before the first.
            timeout_s: by default ``recovery_timeout_s``, and ``store_timeout_s`` for the first generation. A rank
                that joins waits without limit.
            why: the reason that the coordinator is told if it is asked for a generation.

        Raises:
            Fenced: the others go on without this rank (I8), or have finished.
            JobStopped: the job cannot go on.
            ControlPlaneLost: also if no generation came in time.
        """
        found = self._entering.next_generation(after, timeout_s, why=why)
        self.reports.ran_out = False
        return found

    def meet(self, generation: Generation) -> None:
        """Meet the ranks that join in ``generation``, which begins between two steps. This rank is in its groups.

        When it returns, the others are in them, too, or about to be. Raises Superseded.
        """
        if self.rank in generation.fresh:
            self._entering.await_others(generation.number)
        elif generation.fresh:
            self._entering.let_in(generation)

    def with_all_routes(self, number: int, layout: Layout) -> Layout:
        """Return ``layout`` of this rank's generation ``number`` with the routes of all microbatches.

        Raises:
            Superseded: the generation has ended.
        """
        return generations.with_all_routes(self._control, number, layout)

    def _hear_offer(self, text: str) -> None:
        """Pass an offered generation on if it concerns this process. Runs in the watcher's thread."""
        offered = generations.read(text, self.rank, self._watcher_control)
        if isinstance(offered, Generation) and concerns(offered, self.rank, self.incarnation):
            self._on_offer(offered)

    def _note_fenced(self, number: int, why: str) -> None:
        if self.journal:
            self.journal.event("fenced", generation=number, why=why)

    def report_live(self, number: int, done: int = 0) -> None:
        """Report that this rank holds all its state of generation ``number``. Returns once that is on record.

        ``done`` is the number of pieces of common work so far, by which the coordinator sees that the job gets on.
        """
        if not self._watch.settled:
            self._control.put(keys.joined_key(self.rank), "")
        self._watch.settled = True
        ago_s = None if self.agreed_s is None else time.monotonic() - self.agreed_s
        live = GenerationLive(ranks=(self.rank,), generation=number, done=done, agreed_ago_s=ago_s)
        self._control.send(live, acknowledged=True)

    def finish(self, number: int, early: int = -1) -> None:
        """Call after the last step: returns when every member of generation ``number`` got here.

        Args:
            number: this rank's generation.
            early: the number of steps done, if the job was asked to end before its last step; else -1.

        Raises:
            Superseded: a rank died first, and the others may need this one to finish their step.
        """
        self.report_live(number)
        self._control.send(RankFinished(rank=self.rank, generation=number, early=early))
        self._watch.await_newer(number, None)
        newest, text = self._watch.newest()
        if not isinstance(generations.read(text, self.rank, self._control), Finished):
            raise Superseded(f"generation {newest} came while rank {self.rank} was finishing")
        # What the script still does may be what the training was for, so the rank leaves only when the script ends.
        atexit.register(self._leave)

    def _leave(self) -> None:
        self.liveness.leave()
        with contextlib.suppress(ControlPlaneLost):
            self._control.put(keys.left_key(self.rank), "")
