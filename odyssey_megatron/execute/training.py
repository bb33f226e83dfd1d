"""The phase TRAIN of one generation on one rank: steps, and what all ranks do together besides them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.errors import Fenced, OutOfMemory, PeerFailed
from odyssey_megatron.execute.chronicle import Chronicle
from odyssey_megatron.execute.filling import Filling
from odyssey_megatron.execute.held import SlowLinks
from odyssey_megatron.execute.left_out import dispensable, leave_out
from odyssey_megatron.execute.lookout import Lookout
from odyssey_megatron.execute.parts import Member, Model
from odyssey_megatron.execute.position import CommonWork, Position
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.execute.regrouping import Regrouping
from odyssey_megatron.execute.step import StepAtHand, StepRunner
from odyssey_megatron.execute.suspects import Exchange, examine
from odyssey_megatron.execute.timing import Measurements, Trace
from odyssey_megatron.execute.votes import Ballot, Votes
from odyssey_megatron.names import step_name
from odyssey_megatron.plan.scheduling.smaller import smaller
from odyssey_megatron.plan.sending.assignment import Assignment


@dataclass(kw_only=True)
class Training:
    """What a rank does in one generation from when it has its layers, or when they are on their way."""

    assignment: Assignment
    runner: StepRunner
    filling: Filling
    # These outlive the generation.
    cell: Cell
    member: Member
    model: Model
    groups: Regrouping
    position: Position
    at_hand: StepAtHand
    ballot: Ballot
    lookout: Lookout
    chronicle: Chronicle
    measured: Measurements
    slow: SlowLinks
    times_links: bool
    """Whether links are timed between steps."""

    # -- a step ---------------------------------------------------------------------------------------------------

    def run_step(self) -> None:
        """See ``recover.Rank``."""
        step, runner = self.position.committed, self.runner
        self.slow.begin(step)
        if self.times_links and self.measured.measures(step) and self.chronicle.steps_here:
            self.lookout.fault("exchange")
            runner.time_links()
        began_s, trace = time.monotonic(), self.measured.trace(step)
        self.position.begin()
        with asking_for_less(step):
            runner.run(self.at_hand, trace)
        trace.probe()
        progress = self.at_hand.progress
        assert progress is not None
        totals = self._agreed(progress, trace)
        if not torch.isfinite(totals).all() and not self.model.loss_scale.blames_nobody:
            totals = self._examined(totals, progress)
        with trace.stepping():
            self.at_hand.commit(totals)
        self.groups.count(self.position.votes)
        self.spread_weights()
        self.member.liveness.rest(behind_step=True)
        layout, worker = self.assignment.layout, self.assignment.worker
        self.chronicle.ended(
            step,
            trace,
            time.monotonic() - began_s,
            lambda: {layer: self.model.holdings.moved_bytes(layer) for layer in layout.kept_by(worker)},
            optimizer_bytes=self.model.holdings.optimizer_bytes,
            expert_loads=self.model.end.expert_loads,
            is_whole=self.model.microbatches_of(step) == layout.num_microbatches,
        )
        if self.assignment.generation.planned and self.chronicle.steps_here == 1:
            self.groups.part(together=True)  # who has agreed on the step has what it lacked
        if trace.measured:
            self.model.end.timed(trace.compute_s)
        if self.groups.boundary or self.member.liveness.asked == Ask.LEAVE:
            self.settle()  # while all who send something are still there
        if self.member.liveness.asked == Ask.LEAVE:
            raise Fenced("its node was asked to leave the job, and does behind this step")

    def _agreed(self, progress: Progress, trace: Trace) -> torch.Tensor:
        """Return the totals of all ranks, once all gradients of the step are reduced everywhere. 1-D, on the host."""
        self.chronicle.samples(self.position.committed, self.model.end.samples_of_losses())
        with asking_for_less(self.position.committed):
            self.filling.finish()
            self.lookout.check("agreement")
            own = self.model.end.local_totals()
            # The host waits for its device here, once a step: whoever enters the agreement has computed all of
            # the step.
            totals = self.ballot.cast(own, progress.missing(own.device))
        self.groups.entered.settle()
        self.position.complete = CommonWork.STEP
        with trace.agreeing():
            dist.all_reduce(totals, group=self.groups.world)
        if missing_somewhere := int(Votes.of(totals).missing):
            raise PeerFailed(
                f"{missing_somewhere} instruction(s) of {step_name(self.position.committed)} counted for nothing"
            )
        return totals

    def _examined(self, totals: torch.Tensor, progress: Progress) -> torch.Tensor:
        """Examine a step whose numbers are not finite, and return the totals to go on with.

        Workers that are found to compute wrongly leave the job.
        """
        assignment = self.assignment
        layout = self.member.with_all_routes(assignment.number, assignment.layout)
        layout = smaller(layout, (), self.model.microbatches_of(self.position.committed)).layout
        progress.give_up()

        def again(exchange: Exchange) -> tuple[Progress, bool]:
            nonlocal totals
            self.position.begin()
            trial = self.runner.run_exchanged(exchange)
            totals = self._agreed(trial, self.measured.trace(self.position.committed))
            return trial, bool(torch.isfinite(totals).all())

        wrong, tainted = examine(layout, self.cell, self.groups.world, progress, again)
        self._leave_out(wrong, self.position.committed)
        self.model.end.suspect(tainted)
        return totals

    def spread_weights(self) -> None:
        """Start sending the weights of the last step to holders that lack the state to make it."""
        if self.filling.spreads:
            self.lookout.fault("param_gather", step=self.position.committed - 1)
            self.filling.spread()

    def settle(self) -> None:
        """See ``recover.Rank``. The host waits for its device, as work that the device has not come to would
        be lost with groups that are left, or with the process.
        """
        self.filling.finish()
        self.groups.entered.settle()

    # -- what all do together besides steps -----------------------------------------------------------------------

    def evaluate(self, first: int, microbatches: int) -> None:
        """See ``StepRunner.evaluate``."""
        with self.lookout.evaluating(), asking_for_less(self.position.committed):
            self.runner.evaluate(first, microbatches)

    def together(self, work: Callable[[dist.ProcessGroup], None]) -> None:
        self.position.begin()
        self.filling.finish()
        work(self.groups.world)
        self.groups.entered.settle()
        self.lookout.check("")
        self.position.complete = CommonWork.OTHER
        dist.barrier(group=self.groups.world)
        self.position.finish()
        self.member.liveness.rest(behind_step=False)

    def check_holders(self, world: dist.ProcessGroup) -> None:
        """Work for :meth:`together`: leave out workers whose bytes of a layer differ from those of most of
        its holders.
        """
        self._leave_out(
            self.model.holdings.odd_holders(world, rank=self.cell.rank), self.position.committed - 1
        )

    def _leave_out(self, wrong: Mapping[int, str], step: int) -> None:
        """Make the workers whose numbers are wrong leave, unless the job cannot do without them. Collective."""
        if wrong and dispensable(self.assignment.layout, wrong):
            leave_out(wrong, self.groups.world, self.cell, step, self.chronicle.event)


@contextmanager
def asking_for_less(step: int) -> Iterator[None]:
    """Raise OutOfMemory if the body does. No weight has changed in ``step``, so a plan that needs less may do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        text = str(error).partition("\n")[0]
        raise OutOfMemory(f"out of memory in {step_name(step)}: {text}") from None
