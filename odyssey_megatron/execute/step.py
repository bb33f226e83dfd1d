"""The step at hand, which may take several generations, and how one generation carries it out."""

from __future__ import annotations

import torch
import torch.distributed as dist

from odyssey_megatron.errors import PeerFailed
from odyssey_megatron.execute.chronicle import Chronicle
from odyssey_megatron.execute.interpreter import FORWARD_ONLY, Interpreter
from odyssey_megatron.execute.interrupted import Rest, go_on
from odyssey_megatron.execute.lookout import Lookout
from odyssey_megatron.execute.neighbours import Neighbours
from odyssey_megatron.execute.parts import Model
from odyssey_megatron.execute.position import Position
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.execute.suspects import Exchange, renumbered
from odyssey_megatron.execute.timing import Measurements, Trace
from odyssey_megatron.execute.votes import NUM_VOTES
from odyssey_megatron.names import step_name
from odyssey_megatron.plan.schedule import Program
from odyssey_megatron.plan.sending.assignment import Assignment


class StepAtHand:
    """What one rank has done of the step at hand, and what is left of it, until the step is committed (I5).

    Args:
        device: The device that the model is on.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        position: Position,
        chronicle: Chronicle,
        lookout: Lookout,
    ):
        self._model, self._device = model, device
        self._position, self._chronicle, self._lookout = position, chronicle, lookout
        self.progress: Progress | None = None
        """What has been done of the step; None if it has not begun, or must begin anew."""
        self._rest: Program | None = None
        """What is left to do of a step that goes on after a failure; None: all of it."""

    def begin(self, assignment: Assignment) -> Progress:
        """Begin the step, unless it is one that goes on; return its progress."""
        if self.progress is None:
            self._model.begin_step(self._position.committed)
            self.progress = new_progress(assignment)
        return self.progress

    def take_rest(self) -> Program | None:
        """Return, once, what is left of a step that goes on; None: run the whole program."""
        rest, self._rest = self._rest, None
        return rest

    def take_stock(self, *, together: bool) -> None:
        """Find out what the device has really done, as the generation has ended and the device is idle.

        Visits that counted for nothing are undone, to be done anew.

        Args:
            together: Whether all ranks that go on heard of the end in time, so that none of them took the
                leftovers of an aborted message for data. If not, the step is done again.
        """
        if self.progress is not None:
            self._model.compute.undo(self.progress.take_stock())
            self.progress.whole = self.progress.whole and together

    def go_on(
        self,
        assignment: Assignment,
        world: dist.ProcessGroup,
        cell_group: dist.ProcessGroup | None,
    ) -> Rest:
        """Decide in a new generation whether the step goes on where it was interrupted or begins anew.

        See ``interrupted.go_on``.
        """
        rest = go_on(
            world,
            cell_group,
            assignment.step(self._model.microbatches_of(self._position.committed)),
            assignment.cell,
            self.progress or new_progress(assignment),
            self._model.compute,
            self._device,
            keep=assignment.plan.keeps_messages,
        )
        self._rest = rest.program
        if rest.program is None:
            # Its activations would lie beside the layers that come.
            self._model.compute.drop_flights()
            self.progress = None
        return rest

    def commit(self, totals: torch.Tensor) -> None:
        """Apply the step, by its ``totals``, 1-D. From here on nothing is sent or cut short: who has them finishes."""
        step, position, lookout = self._position.committed, self._position, self._lookout
        if self.progress is not None:
            self.progress.agreed()
        position.applies = True
        position.outcome = self._model.end.apply(totals[:-NUM_VOTES], lambda: lookout.fault("optimizer"))
        position.applies = False
        position.commit(totals)
        self._chronicle.committed(step, position.outcome)
        self.forget()
        lookout.fault("commit", step=step)

    def forget(self) -> None:
        """Forget the step: it is done, or has not begun."""
        self.progress = self._rest = None


class StepRunner:
    """Carries out one rank's part of a generation's plan."""

    def __init__(
        self,
        assignment: Assignment,
        model: Model,
        interpreter: Interpreter,
        position: Position,
        measured: Measurements,
    ):
        self._assignment, self._model, self._interpreter = assignment, model, interpreter
        self._position, self._measured = position, measured

    def run(self, at_hand: StepAtHand, trace: Trace) -> None:
        """Run the program of the step, or what is left of it."""
        progress, rest = at_hand.begin(self._assignment), at_hand.take_rest()
        if rest is None:
            self._interpreter.run(self._program_of_step(), trace, progress)
        else:
            self._run_once_more(rest, trace, progress)

    def run_exchanged(self, exchange: Exchange) -> Progress:
        """Run all of the step once more, with microbatches exchanged; return the progress of that attempt."""
        self._model.begin_step(self._position.committed)
        program = renumbered(self._program_of_step(), exchange)
        trial = new_progress(self._assignment, keeps=False)
        self._run_once_more(program, self._measured.trace(self._position.committed), trial)
        return trial

    def _program_of_step(self) -> Program:
        return self._assignment.step(self._model.microbatches_of(self._position.committed)).program

    def _run_once_more(self, program: Program, trace: Trace, progress: Progress) -> None:
        """Run ``program`` in addition to what has been done of the step already.

        Raises:
            PeerFailed: Memory ran out, since what was in flight here came on top of what the plan keeps in
                flight. Done again from its beginning, the step fits.
        """
        try:
            self._interpreter.run(program, trace, progress)
        except torch.OutOfMemoryError as error:
            progress.whole = False
            step = step_name(self._position.committed)
            raise PeerFailed(f"no memory to go on with {step}: {error}") from error

    def evaluate(self, first: int, microbatches: int) -> None:
        """Run at most a plan's number of ``microbatches`` through the layers, forward only.

        ``first`` is the number of the first one.
        """
        self._model.begin_evaluation(first, microbatches)
        program = self._assignment.step(microbatches).program
        trace = self._measured.trace(self._position.committed)
        progress = new_progress(self._assignment, keeps=False)
        with torch.no_grad():
            self._interpreter.run([one for one in program if one.op in FORWARD_ONLY], trace, progress)

    def time_links(self) -> None:
        """Time messages and sums with the workers that exchange activations with this one, or hold its layers.

        All of these workers must call this, too.
        """
        interpreter, assignment = self._interpreter, self._assignment
        neighbours = Neighbours(
            assignment.program,
            assignment.layout,
            assignment.cells,
            interpreter.channels,
            interpreter.holder_groups,
        )
        self._measured.exchange(self._position.committed, neighbours, self._model.compute.empty_message())

    def abandon(self) -> None:
        """Let go of messages and sums under way, as the generation has ended."""
        self._interpreter.abandon()


def new_progress(assignment: Assignment, *, keeps: bool | None = None) -> Progress:
    """Return the progress of a step, or an evaluation, that has not begun.

    ``keeps``: see :class:`Progress`; None: as the plan says.
    """
    layout, keeps = assignment.layout, assignment.plan.keeps_messages if keeps is None else keeps
    return Progress(layout.num_microbatches, layout.num_layers, keeps=keeps, alone=assignment.cell.size == 1)
