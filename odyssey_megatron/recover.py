"""The whole flow on one screen. Read this file first.

    failure event -> ClusterState -> decide() -> Plan -> rebuild -> execute -> measurements -> Profile -> (decide)
       launch/        cluster/       policy/     plan/   rebuild/   execute/     execute/      policy/

The coordinator (``launch/coordinator.py``) is the only one who decides: it applies what happened to the
``ClusterState``, has ``policy/decide.py`` find and verify the best plan for it, and publishes both as a new
``Generation``. Every rank has a :class:`Recovery`: it enters the newest generation, works until that generation
ends, and enters the next. Starting a job and recovering from a failure are the same code.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from odyssey_megatron.errors import ControlPlaneLost, Fenced, JobStopped, PeerFailed, Superseded
from odyssey_megatron.plan.generation import Generation

T = TypeVar("T")


class Phase(enum.Enum):
    """Where a rank stands. Each phase can be cut short by a newer generation, which leads back to ABORT."""

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
"""The legal transitions. From TRAIN to GROUPS: an offered generation begins between two steps. After TRAIN a rank may
also be done."""


class Control(Protocol):
    """This rank's line to the coordinator (``launch/member.py``)."""

    def next_generation(self, after: int, *, why: str = "") -> Generation:
        """Waits for a generation newer than ``after``, and asks for one if none comes: ``why`` it needs one, if it
        knows. Raises Fenced if this rank is not in it, JobStopped if there is none (I9).
        """
        ...

    def take_offer(self, number: int) -> None:
        """Offered generation ``number`` is the newest one from now on, unless there is a newer one."""
        ...

    def report_live(self, number: int, done: int) -> None:
        """All state of the plan is here, and so many pieces of common work are done; must return before the first
        step's agreement is entered.
        """
        ...

    def finish(self, number: int, early: int = -1) -> None:
        """All steps are committed here; returns when they are everywhere. Raises Superseded if one must help."""
        ...


class Rank(Protocol):
    """What a rank does in each phase (``execute/rank.py``). Every method raises Superseded or PeerFailed at need."""

    @property
    def committed(self) -> int:
        """Steps committed so far; the next step's number."""
        ...

    @property
    def done(self) -> int:
        """Pieces of common work that the job has done: steps, and what was done together."""
        ...

    @property
    def own(self) -> int:
        """Those that this rank has had a part in. What the others did while it was away, e.g. before it was asked to
        join once more, is not among them.
        """
        ...

    def enter_phase(self, phase: Phase) -> None:
        """Notes the time. Raises if the transition is not in NEXT."""
        ...

    def abort(self, why: Exception) -> None:
        """Leaves every wait of the old generation, and makes neighbours leave theirs."""
        ...

    def build_groups(self, generation: Generation) -> None:
        """Exactly the groups that the plan needs, and none without the generation's number in its name (I7)."""
        ...

    def agree(self, generation: Generation) -> None:
        """All members carry out the same plan; a step that somebody has committed is finished by everybody (I5), and an
        interrupted one goes on where it was, or is done again.
        """
        ...

    def transfer(self, generation: Generation, live: Callable[[], None]) -> None:
        """Moves the missing layers and assembles this rank's blocks.

        Calls ``live`` when all is here: at once, or in an offered generation before its first agreement, as the layers
        may move while the first step computes.
        """
        ...

    @property
    def is_over(self) -> bool:
        """The groups are aborted, on a device that goes on with what that has left: nothing that comes of it counts, be
        it an error.
        """
        ...

    @property
    def ends(self) -> bool:
        """The job was asked to end, and the last committed step is the last one: on all ranks or on none."""
        ...

    @property
    def boundary(self) -> int:
        """The offered generation that all members have prepared and enter before the next step; 0: none."""
        ...

    def run_step(self, generation: Generation) -> None:
        """One training step; committed when it returns."""
        ...

    def settle(self) -> None:
        """Nothing of what is committed is still on its way when it returns."""
        ...

    def together(self, work: Callable[[Any], None]) -> None:
        """``work(world)`` and a barrier; done when it returns."""
        ...


class Recovery:
    """Keeps one rank in the newest generation, whatever happens."""

    def __init__(self, control: Control, rank: Rank):
        self._control, self._rank = control, rank
        self._number = 0
        self._live: Generation | None = None
        self._why = ""
        """What has gone wrong here that no news of another rank explains yet."""

    def carry_out(self, work: Callable[[Generation], T]) -> T:
        """``work`` in a live generation; once more, in the next one, whenever its generation ends.

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
        """The next training step. An offered generation that all have prepared begins before it.

        Returns with a step that this rank has had its part in: the next one, or, if it has just joined and the others
        went on without it, whichever they let it into.
        """
        if self._rank.boundary:
            self._control.take_offer(self._rank.boundary)
            self._live = None
        self._carry_out_once(self._rank.run_step)

    def together(self, work: Callable[[Any], T]) -> T:
        """``work(world)``, which all ranks do together besides steps: an evaluation, a checkpoint, a barrier.

        It is done again wherever a failure cuts it short, unless somebody is through with it: then everybody is.
        """
        results: list[T] = []

        def attempt(generation: Generation) -> None:
            self._rank.together(lambda world: results.__setitem__(slice(None), [work(world)]))

        self._carry_out_once(attempt)
        return results[0]

    def settle(self) -> None:
        """What the last step has left under way is here, whatever happens meanwhile."""
        self.carry_out(lambda generation: self._rank.settle())

    def finish(self, early: int = -1) -> None:
        """The job is over; ``early``: see :meth:`Control.finish`."""

        def work(generation: Generation) -> None:
            self._rank.settle()
            self._control.finish(generation.number, early)

        self.carry_out(work)

    def _carry_out_once(self, work: Callable[[Generation], None]) -> None:
        """Until this rank has had its part in one more piece of common work, be it that another one's coming through
        has completed it.
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
    """Trains until ``train_steps`` are committed everywhere, or fewer if the job is asked to end, through any number of
    generations. Raises as above.

    ``at_end`` is part of the job: what is done together there is done again by those who are left, if somebody dies.
    """

    recovery = Recovery(control, rank)
    recovery.carry_out(lambda generation: None)
    while rank.committed < train_steps and not rank.ends:
        recovery.step()
        after_step(recovery)
    at_end(recovery)
    recovery.finish(rank.committed if rank.committed < train_steps else -1)
