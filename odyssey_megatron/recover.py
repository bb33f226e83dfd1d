"""The whole flow of a job, from start to end and through its failures. Read this file first.

    failure event -> ClusterState -> decide() -> Plan -> rebuild -> execute -> measurements -> Profile -> (decide)
       launch/        cluster/       policy/     plan/   rebuild/   execute/     execute/      policy/

Only the coordinator (``launch/coordinator/coordinator.py``) decides: it applies each event to the ``ClusterState``, has
``policy/decide.py`` find and verify the best plan for that state, and publishes both as a new ``Generation``. Every
rank has a :class:`Recovery`, which enters the newest generation, works until that generation ends, and enters the
next. Starting a job and recovering from a failure are the same code.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from odyssey_megatron.errors import ControlPlaneLost, Fenced, JobStopped, PeerFailed, Superseded
from odyssey_megatron.plan.sending.generation import Generation

T = TypeVar("T")


class Phase(enum.Enum):
    """The phase of a recovery that a rank is in. A newer generation can cut each phase short: then ABORT follows."""

    ABORT = "abort"
    GROUPS = "groups"
    AGREE = "agree"
    TRANSFER = "transfer"
    TRAIN = "train"


NEXT: dict[Phase, tuple[Phase, ...]] = {
    Phase.ABORT: (Phase.GROUPS,),
    Phase.GROUPS: (Phase.AGREE, Phase.ABORT),
    Phase.AGREE: (Phase.TRANSFER, Phase.ABORT),
    Phase.TRANSFER: (Phase.TRAIN, Phase.ABORT),
    Phase.TRAIN: (Phase.ABORT, Phase.GROUPS),
}
"""The legal transitions. A rank goes from TRAIN straight to GROUPS when an offered generation begins between two
steps. TRAIN is also the last phase of a rank that finishes."""


class Control(Protocol):
    """This rank's connection to the coordinator (implemented in ``launch/rank/member.py``)."""

    def next_generation(self, after: int, *, why: str = "") -> Generation:
        """Wait for a generation newer than ``after`` and return it.

        Args:
            after: the number of the last generation that this rank has entered.
            why: what went wrong here, if known. If no generation comes the rank asks for one, with this reason.

        Raises:
            Fenced: this rank is not in the new generation.
            JobStopped: there will be no new generation (I9).
        """
        ...

    def take_offer(self, number: int) -> None:
        """Treat the offered generation ``number`` as the newest one from now on, unless there is a newer one."""
        ...

    def report_live(self, number: int, done: int) -> None:
        """Report that this rank has all its state of generation ``number``.

        ``done`` is the number of pieces of common work that the job has done. The call must return before this rank
        enters the agreement of the generation's first step.
        """
        ...

    def finish(self, number: int, early: int = -1) -> None:
        """Report that all steps are committed here, and return when they are committed everywhere.

        Args:
            number: the generation in which this rank has finished.
            early: the number of steps done, if the job was asked to end before all were; else -1.

        Raises:
            Superseded: somebody died first, and the others may need this rank to finish their step.
        """
        ...


class Rank(Protocol):
    """What a rank does in each phase (implemented in ``execute/rank.py``).

    Every method may raise Superseded or PeerFailed.
    """

    @property
    def committed(self) -> int:
        """Number of steps committed so far, which is also the next step's number."""
        ...

    @property
    def done(self) -> int:
        """Number of pieces of common work that the job has done: steps, and calls of :meth:`together`."""
        ...

    @property
    def own(self) -> int:
        """Number of pieces of common work that this rank has had a part in.

        What the others did while it was away, e.g. before it was asked to join once more, does not count.
        """
        ...

    def enter_phase(self, phase: Phase) -> None:
        """Note the time at which ``phase`` begins. Raises if the transition is not in NEXT."""
        ...

    def abort(self, why: Exception) -> None:
        """Leave every wait of the old generation, and make neighbours leave theirs."""
        ...

    def build_groups(self, generation: Generation) -> None:
        """Build exactly the groups that the plan needs, all with the generation's number in their names (I7)."""
        ...

    def agree(self, generation: Generation) -> None:
        """Make sure that all members carry out the same plan, and are equally far.

        A step that somebody has committed is finished by everybody (I5). An interrupted step goes on where it was, or
        is done again.
        """
        ...

    def transfer(self, generation: Generation, live: Callable[[], None]) -> None:
        """Move the missing layers and assemble this rank's blocks.

        Calls ``live`` when all state is here. That is before this method returns, except in an offered generation,
        whose layers may move while the first step computes: there it is before that step's agreement.
        """
        ...

    @property
    def is_over(self) -> bool:
        """Whether the groups are aborted while the device still runs what was queued.

        Nothing that comes of that work counts, not even an error.
        """
        ...

    @property
    def ends(self) -> bool:
        """Whether the job was asked to end and ends with the last committed step: true on all ranks or on none."""
        ...

    @property
    def boundary(self) -> int:
        """The offered generation that all members have prepared and enter before the next step; 0: none."""
        ...

    def run_step(self, generation: Generation) -> None:
        """Run one training step, which is committed when this returns."""
        ...

    def settle(self) -> None:
        """Wait until nothing of what is committed is still on its way."""
        ...

    def together(self, work: Callable[[Any], None]) -> None:
        """Call ``work(world)`` and wait at a barrier; the piece of common work is done when this returns."""
        ...


class Recovery:
    """Keeps one rank in the newest generation, whatever happens."""

    def __init__(self, control: Control, rank: Rank):
        self._control, self._rank = control, rank
        self._number = 0
        self._live: Generation | None = None
        self._why = ""
        """The last failure of a message here, until a new generation explains it; empty: none."""

    def carry_out(self, work: Callable[[Generation], T]) -> T:
        """Return ``work(generation)`` of a live generation; whenever that ends, call it again in the next one.

        Raises:
            JobStopped: the coordinator says that the job cannot go on (I9).
            Fenced: this rank was declared dead (I8).
        """
        while True:
            try:
                if self._live is None:
                    self._live = self._enter_next()
                return work(self._live)
            except (JobStopped, Fenced, ControlPlaneLost):
                raise
            except Exception as why:
                if not isinstance(why, Superseded | PeerFailed) and not self._rank.is_over:
                    raise
                self._live, self._why = None, str(why) if isinstance(why, PeerFailed) else ""
                self._rank.enter_phase(Phase.ABORT)
                self._rank.abort(why)

    def step(self) -> None:
        """Run the next training step. An offered generation that all have prepared begins before it.

        Returns after a step that this rank had a part in. That is the next step, or, if this rank has just joined
        and the others went on without it, the first one that it takes part in.
        """
        if self._rank.boundary:
            self._control.take_offer(self._rank.boundary)
            self._live = None
        self._carry_out_once(self._rank.run_step)

    def together(self, work: Callable[[Any], T]) -> T:
        """Return ``work(world)``, which all ranks do together besides steps: an evaluation, a checkpoint, a barrier.

        If a failure cuts it short it is done again, unless some rank has completed it: then it is done for all.
        """
        results: list[T] = []

        def attempt(generation: Generation) -> None:
            self._rank.together(lambda world: results.__setitem__(slice(None), [work(world)]))

        self._carry_out_once(attempt)
        return results[0]

    def settle(self) -> None:
        """Wait until what the last step has left on its way has arrived, through any failures meanwhile."""
        self.carry_out(lambda generation: self._rank.settle())

    def finish(self, early: int = -1) -> None:
        """End the job together with the other ranks; ``early``: see :meth:`Control.finish`."""

        def work(generation: Generation) -> None:
            self._rank.settle()
            self._control.finish(generation.number, early)

        self.carry_out(work)

    def _carry_out_once(self, work: Callable[[Generation], None]) -> None:
        """Do one more piece of common work, and do it once.

        ``work`` is not called again if this rank has had its part by then: when another rank has completed the
        piece before a failure, entering the next generation completes it here, too.
        """
        before = self._rank.own

        def once(generation: Generation) -> None:
            if self._rank.own == before:
                work(generation)

        self.carry_out(once)

    def _enter_next(self) -> Generation:
        control, rank = self._control, self._rank
        generation = control.next_generation(after=self._number, why=self._why)
        self._number, self._why = generation.number, ""
        rank.enter_phase(Phase.GROUPS)
        rank.build_groups(generation)
        rank.enter_phase(Phase.AGREE)
        rank.agree(generation)
        rank.enter_phase(Phase.TRANSFER)
        rank.transfer(generation, live=lambda: control.report_live(generation.number, rank.done))
        rank.enter_phase(Phase.TRAIN)
        return generation


def train(
    control: Control,
    rank: Rank,
    *,
    train_steps: int,
    after_step: Callable[[Recovery], None] = lambda recovery: None,
    at_end: Callable[[Recovery], None] = lambda recovery: None,
) -> None:
    """Train until ``train_steps`` steps are committed everywhere, through any number of generations.

    The job may end earlier if it is asked to.

    Args:
        after_step: called after each step.
        at_end: called after the last step. It is part of the job: if a rank dies during what is done together there,
            the remaining ranks do it again.

    Raises:
        JobStopped, Fenced: as :meth:`Recovery.carry_out`.
    """

    recovery = Recovery(control, rank)
    recovery.carry_out(lambda generation: None)
    while rank.committed < train_steps and not rank.ends:
        recovery.step()
        after_step(recovery)
    at_end(recovery)
    recovery.finish(rank.committed if rank.committed < train_steps else -1)
