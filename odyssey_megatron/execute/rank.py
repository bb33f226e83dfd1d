"""One rank's part in recoveries and training steps: the code that carries out what ``recover.py`` asks for.

It knows nothing of Megatron and takes no decisions. Its components have files of their own: how far the rank
is (``position.py``), its groups (``regrouping.py``), the step at hand (``step.py``, ``interrupted.py``),
layers on their way (``filling.py``), the numbers that are summed along with a step's agreement
(``votes.py``), and the check before each instruction for a newer generation and for faults to inject
(``lookout.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import Fenced, OutOfMemory, PeerFailed, Superseded
from odyssey_megatron.execute.channels import Channels
from odyssey_megatron.execute.chronicle import Chronicle
from odyssey_megatron.execute.filling import Filling
from odyssey_megatron.execute.held import SlowLinks
from odyssey_megatron.execute.interpreter import Interpreter, Weights
from odyssey_megatron.execute.interrupted import Rest
from odyssey_megatron.execute.ledger import Ledger
from odyssey_megatron.execute.left_out import dispensable, leave_out
from odyssey_megatron.execute.lookout import Lookout
from odyssey_megatron.execute.parts import FaultPoint, GroupBuilder, Groups, Member, Model
from odyssey_megatron.execute.position import CommonWork, Position
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.execute.regrouping import Regrouping
from odyssey_megatron.execute.step import StepAtHand, StepRunner
from odyssey_megatron.execute.suspects import Exchange, examine
from odyssey_megatron.execute.timing import DeviceTime, Measurements, OwnTime, Stopwatch, link_times
from odyssey_megatron.execute.votes import NUM_VOTES, Ballot, Votes
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.names import step_name
from odyssey_megatron.plan.assignment import Assignment
from odyssey_megatron.plan.generation import Generation
from odyssey_megatron.plan.groups import WORLD, holder_groups
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.smaller import smaller
from odyssey_megatron.rebuild import agree
from odyssey_megatron.rebuild.agree import Standing
from odyssey_megatron.recover import Phase


class RankRuntime:
    """A rank's runtime: the implementation of ``recover.Rank``."""

    def __init__(
        self,
        *,
        config: OdysseyConfig,
        member: Member,
        model: Model,
        build: GroupBuilder,
        tagged_messages: bool,
        fault_point: FaultPoint,
        journal: Journal,
        on_commit: Callable[[int, Any], None],
        on_groups: Callable[[Groups], None] = lambda groups: None,
        slowness: Callable[[int], float] = lambda step: 1.0,
        slow_links: Callable[[int], Mapping[int, float]] = lambda step: {},
        stopwatch: Stopwatch | None = None,
        cell: Cell | None = None,
        first_step: int = 0,
        device: str | None = None,
    ):
        """Create a rank that is in no generation yet.

        Args:
            device: The device that the model is on; None: the one that ``config`` names.
        """
        self._member, self._model, self._cell = member, model, cell or Cell(rank=member.rank)
        self._device, self._tagged = torch.device(device or config.device), tagged_messages
        stopwatch = stopwatch or (DeviceTime() if config.device == "cuda" else OwnTime())
        self._measured = Measurements(config.profile_steps, slowness, member.incarnation, stopwatch)
        self._times_links, self._slow = config.time_links == "on", SlowLinks(slow_links)
        self.chronicle = Chronicle(
            journal, member, self._measured, on_commit=on_commit, trace_steps=config.trace_steps
        )
        self._position = Position(first_step, model.end.num_totals + NUM_VOTES)
        self._at_hand = StepAtHand(model, self._device, keeps=config.resumes_steps)
        self._lookout = Lookout(member, fault_point, self._position, self.chronicle)
        self._groups = Regrouping(
            self._cell, build, decline=member.decline, on_groups=on_groups, tagged=tagged_messages
        )
        self.ballot = Ballot(wants_end=lambda: member.asked == Ask.END, prepared=self._groups.ballot)
        self._assignment: Assignment | None = None
        """The assignment of the generation that this rank is in, from the phase GROUPS on."""
        self._filling: Filling | None = None
        self._runner: StepRunner | None = None
        """The runner of that generation, from the phase TRANSFER on and until the generation is aborted."""
        self._ran_out = False
        """Whether the last generation ended because this rank ran out of its device's memory."""
        member.on_offer(self._groups.prepare)

    # -- where it is ----------------------------------------------------------------------------------------------

    def begin_at(self, step: int) -> None:
        """Set the number of steps committed so far, as the checkpoint that has been loaded says."""
        self._position.committed = step

    @property
    def committed(self) -> int:
        """See ``recover.Rank``; the same goes for :attr:`done` and :attr:`own`."""
        return self._position.committed

    @property
    def done(self) -> int:
        return self._position.done

    @property
    def own(self) -> int:
        return self._position.own

    @property
    def is_over(self) -> bool:
        return self._groups.are_over and not self._position.applies

    @property
    def ends(self) -> bool:
        return self.votes.end > 0

    @property
    def boundary(self) -> int:
        return self._groups.boundary

    @property
    def outcome(self) -> Any:
        """The outcome of the last committed step, as ``Model.apply`` returned it."""
        return self._position.outcome

    @property
    def votes(self) -> Votes:
        """The votes of the last step that was agreed on."""
        return Votes.of(self._position.totals)

    @property
    def generation(self) -> int:
        """The number of the generation that this rank is in; 0 before the first."""
        return self._lookout.generation

    @property
    def plan(self) -> Plan:
        """The plan of the generation that this rank is in."""
        return self._assigned.plan

    @property
    def _assigned(self) -> Assignment:
        assert self._assignment is not None
        return self._assignment

    def holders_of(self, first: int, last: int, slot: int) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
        """See ``Regrouping.holders_of``."""
        return self._groups.holders_of(self._assigned, first, last, slot)

    # -- a recovery, phase by phase -------------------------------------------------------------------------------

    def enter_phase(self, phase: Phase) -> None:
        self.chronicle.way.clock.enter(phase)
        if phase is Phase.ABORT:
            self._lookout.fault(phase.value)

    def abort(self, why: Exception) -> None:
        if isinstance(why, PeerFailed):
            self.chronicle.event("cut_short", self.committed, why=str(why))
        if isinstance(why, OutOfMemory):
            self._ran_out = True
            self._member.ask_retry(self._groups.entered.number, str(why), out_of_memory=True)
            if self._at_hand.progress is not None:
                self._at_hand.progress.give_up()  # what is kept of the step takes memory
        if self._groups.holds is not None:
            # All ranks must end the generation together; otherwise one that has not heard would take the
            # leftovers of an aborted message for what was sent.
            self._member.await_newer(self._groups.entered.number, str(why))
        if self._runner is not None:
            self._runner.abandon()
        self._runner = self._filling = None
        self._groups.abort()
        if self._groups.has_entered and self._at_hand.progress is not None:
            self._groups.entered.drain()
            self._at_hand.take_stock(together=self._groups.entered.fell_together)
        self._groups.leave()
        self._model.transfer.discard_incoming()

    def build_groups(self, generation: Generation) -> None:
        # Not verified again: the coordinator has done so, and on every rank it would add milliseconds to the
        # stall.
        if self._ran_out:
            self._ran_out = False
            torch.cuda.empty_cache()  # what it keeps in pieces for tensors of other shapes
        self._assignment = assignment = Assignment.of(generation, self._cell)
        self._position.joins = assignment.is_fresh
        if assignment.is_fresh:
            self._model.forget()
        self.chronicle.begin(generation)
        self._lookout.generation = generation.number
        self._lookout.fault(Phase.GROUPS.value)
        if not self._groups.enter_prepared(generation.number):
            self.abort(Superseded("a newer generation came before the one that was prepared"))
            self._groups.build(assignment)
        self.chronicle.in_groups(speaks=self._groups.world.rank() == 0)
        self._groups.announce()

    def agree(self, generation: Generation) -> None:
        self._lookout.fault(Phase.AGREE.value)
        if generation.planned:
            self._member.meet(generation)
        fingerprint = int(generation.plan_hash, 16) % 2**40 + generation.number
        standings = agree.exchange(self._groups.world, self._position.standing(), fingerprint)
        self.chronicle.agreed()
        finished = agree.left_behind(standings)
        self._catch_up(standings)
        rest = Rest(begun=False)
        if generation.planned:  # a planned generation begins between two steps
            self._at_hand.forget()
        else:
            cell_group = self._groups.within_cell(self._cell.ranks)
            rest = self._at_hand.go_on(self._assigned, self.committed, self._groups.world, cell_group)
            self._groups.entered.settle()
        self._groups.all_have_entered()
        # Nobody is ahead any more, and the blocks that hold these gradients may go.
        self._position.begin()
        again = rest.begun and rest.program is None
        outcome = "redo" if again else "finish" if finished and not rest.begun else "resume"
        self.chronicle.goes_on(outcome, rest.taken_up)

    def _catch_up(self, standings: Sequence[Standing]) -> None:
        """Bring this rank to where the others are: it finishes the piece of common work that they have, or joins.

        A rank that joins takes over the others' position, totals and loss scale.
        """
        position, scale = self._position, self._model.loss_scale
        ahead = agree.furthest(standings)
        known = agree.told(self._groups.world, standings, torch.cat([position.totals, scale.state().cpu()]))
        totals, scale_state = known.tensor_split([len(position.totals)])
        if position.joins:
            position.take_over(ahead, totals)
            self._model.end.take_over(totals[:-NUM_VOTES], position.committed, scale_state)
        elif position.done == ahead.done:
            return
        elif position.complete is CommonWork.STEP:
            self._commit(totals)
        else:
            position.finish()

    def transfer(self, generation: Generation, live: Callable[[], None]) -> None:
        assignment, model = self._assigned, self._model
        model.holdings.take_cell(assignment.cell)
        if assignment.is_first:
            model.holdings.create_layers(assignment.held, assignment.kept)
            for name in (WORLD,) if self._tagged else assignment.timed_pair:
                self._measured.link = link_times(self._groups.entered[name], model.compute.empty_message())
        # A rank that joins, and finds no memory, fails as it did before it joined: the others need no other plan.
        with nullcontext() if assignment.is_fresh else self._asking_for_less():
            self._move_in(assignment, live)
        self.chronicle.started(self.committed)

    def _move_in(self, assignment: Assignment, live: Callable[[], None]) -> None:
        model = self._model
        self._slow.times = self._measured.link or self._slow.times
        channels = Channels(
            self._groups.entered,
            cells=assignment.cells,
            num_layers=assignment.layout.num_layers,
            tagged=self._tagged,
            cuts=model.cuts_activations,
            slow=self._slow,
        )
        self._filling = Filling(
            assignment,
            model,
            self._groups,
            channels,
            checkpoint=lambda: self._lookout.check(Phase.TRANSFER.value),
            live=live,
        )
        if not self._filling.may_wait:
            self._fill()
        with torch.enable_grad():  # an evaluation runs without; it may have been cut short
            model.take_layout(assignment.layout, assignment.worker)
        interpreter = self._interpreter(channels, self._filling.prepare_spreading())
        self._runner = StepRunner(assignment, model, interpreter, self._position, self._measured)
        # A failure may have cut some holders off from the weights of the last step.
        self._spread_weights()

    @contextmanager
    def _asking_for_less(self) -> Iterator[None]:
        """Raises OutOfMemory if the body does: no weight has changed, so a plan that needs less memory may do."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            text = str(error).partition("\n")[0]
            raise OutOfMemory(f"out of memory in {step_name(self.committed)}: {text}") from None

    def _interpreter(self, channels: Channels, weights: Weights) -> Interpreter:
        groups, cell, layout = self._groups, self._assigned.cell, self._assigned.layout
        return Interpreter(
            self._model.compute,
            self._model.sums,
            channels,
            holder_groups(groups.find, self._assigned.cells, layout.blocks()),
            weights=weights,
            tensor_group=groups.within_cell(cell.tensor_ranks),
            num_layers=layout.num_layers,
            checkpoint=self._lookout.check,
            ledger=Ledger(groups.entered.holds, self._device, alone=cell.size == 1),
        )

    def settle(self) -> None:
        """See ``recover.Rank``. The host waits for its device, as work that the device has not come to would
        be lost with groups that are left, or with the process.
        """
        self._fill()
        self._groups.entered.settle()

    def _fill(self) -> None:
        """Wait for all state of the plan and for the last step's weights.

        Called before anything that changes weights, or that needs weights which other ranks send: what the
        device is given from now on sees them.
        """
        if self._filling is not None and (waited_s := self._filling.finish()) is not None:
            self.chronicle.filled(self.committed, waited_s)

    # -- a step ---------------------------------------------------------------------------------------------------

    def run_step(self, generation: Generation) -> None:
        step, runner = self.committed, self._running
        self._slow.begin(step)
        if self._times_links and self._measured.measures(step) and self.chronicle.steps_here:
            self._lookout.fault("exchange")
            runner.time_links()
        began_s, trace = time.monotonic(), self._measured.trace(step)
        self._position.begin()
        with self._asking_for_less():
            runner.run(self._at_hand, trace)
        trace.probe()
        progress = self._at_hand.progress
        assert progress is not None
        totals = self._agreed(progress)
        if not torch.isfinite(totals).all() and not self._model.loss_scale.blames_nobody:
            totals = self._examined(totals, progress)
        self._commit(totals)
        self._groups.count(self.votes)
        self._spread_weights()
        self._member.rest(behind_step=True)
        layout, worker = self._assigned.layout, self._assigned.worker
        self.chronicle.ended(
            step,
            trace,
            time.monotonic() - began_s,
            lambda: {layer: self._model.holdings.moved_bytes(layer) for layer in layout.kept_by(worker)},
            is_whole=self._model.microbatches_of(step) == layout.num_microbatches,
        )
        if trace.measured:
            self._model.end.timed(trace.compute_s)
        if self._groups.boundary or self._member.asked == Ask.LEAVE:
            self.settle()  # while all who send something are still there
        if self._member.asked == Ask.LEAVE:
            raise Fenced("its node was asked to leave the job, and does behind this step")

    def _agreed(self, progress: Progress) -> torch.Tensor:
        """Return the totals of all ranks, once all gradients of the step are reduced everywhere. 1-D, on the host."""
        self.chronicle.samples(self.committed, self._model.end.samples_of_losses())
        self._fill()
        self._lookout.check("agreement")
        own = self._model.end.local_totals()
        # The host waits for its device here, once a step: whoever enters the agreement has computed all of
        # the step.
        totals = self.ballot.cast(own, progress.missing(own.device))
        self._groups.entered.settle()
        self._position.complete = CommonWork.STEP
        dist.all_reduce(totals, group=self._groups.world)
        if missing_somewhere := int(Votes.of(totals).missing):
            raise PeerFailed(
                f"{missing_somewhere} instruction(s) of {step_name(self.committed)} counted for nothing"
            )
        return totals

    def _examined(self, totals: torch.Tensor, progress: Progress) -> torch.Tensor:
        """Examine a step whose numbers are not finite, and return the totals to go on with.

        Workers that are found to compute wrongly leave the job.
        """
        assignment = self._assigned
        layout = self._member.with_all_routes(self.generation, assignment.layout)
        layout = smaller(layout, (), self._model.microbatches_of(self.committed)).layout
        progress.give_up()

        def again(exchange: Exchange) -> tuple[Progress, bool]:
            nonlocal totals
            self._position.begin()
            trial = self._running.run_exchanged(exchange)
            totals = self._agreed(trial)
            return trial, bool(torch.isfinite(totals).all())

        wrong = examine(layout, self._cell, self._groups.world, progress, again)
        self._leave_out(wrong, self.committed)
        return totals

    def _commit(self, totals: torch.Tensor) -> None:
        """Apply the step. From here on nothing is sent or cut short: whoever has the totals finishes (I5)."""
        step, lookout = self.committed, self._lookout
        if self._at_hand.progress is not None:
            self._at_hand.progress.agreed()
        self._position.applies = True
        self._position.outcome = self._model.end.apply(
            totals[:-NUM_VOTES], lambda: lookout.fault("optimizer")
        )
        self._position.applies = False
        self._position.commit(totals)
        self.chronicle.committed(step, self.outcome)
        self._at_hand.forget()
        lookout.fault("commit", step=step)

    def _spread_weights(self) -> None:
        if self._filling is not None and self._filling.spreads:
            self._lookout.fault("param_gather", step=self.committed - 1)
            self._filling.spread()

    @property
    def _running(self) -> StepRunner:
        assert self._runner is not None
        return self._runner

    # -- what all do together besides steps -----------------------------------------------------------------------

    def evaluate(self, first: int, microbatches: int) -> None:
        """See ``StepRunner.evaluate``."""
        with self._lookout.evaluating(), self._asking_for_less():
            self._running.evaluate(first, microbatches)

    def together(self, work: Callable[[dist.ProcessGroup], None]) -> None:
        self._position.begin()
        self._fill()
        work(self._groups.world)
        self._groups.entered.settle()
        self._lookout.check("")
        self._position.complete = CommonWork.OTHER
        dist.barrier(group=self._groups.world)
        self._position.finish()
        self._member.rest(behind_step=False)

    def check_holders(self, world: dist.ProcessGroup) -> None:
        """Work for :meth:`together`: leave out workers whose bytes of a layer differ from those of most of
        its holders.
        """
        self._leave_out(self._model.holdings.odd_holders(world, rank=self._cell.rank), self.committed - 1)

    def _leave_out(self, wrong: Mapping[int, str], step: int) -> None:
        """Make the workers whose numbers are wrong leave, unless the job cannot do without them. Collective."""
        if wrong and dispensable(self._assigned.layout, wrong):
            leave_out(wrong, self._groups.world, self._cell, step, self.chronicle.event)
