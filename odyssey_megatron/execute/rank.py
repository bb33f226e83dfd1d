"""One rank's way from generation to generation: the code that carries out what ``recover.py`` asks for.

It knows nothing of Megatron and takes no decisions. The phases up to TRAIN are here; TRAIN, with a step's
agreement, is in ``training.py``. Its components have files of their own: how far the rank is
(``position.py``), its groups (``regrouping.py``), the step at hand and its commit (``step.py``,
``interrupted.py``), layers on their way (``filling.py``), the numbers that are summed along with a step's
agreement (``votes.py``), and the check before each instruction for a newer generation and for faults to
inject (``lookout.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import OutOfMemory, PeerFailed, Superseded
from odyssey_megatron.execute.channels import Channels
from odyssey_megatron.execute.chronicle import Chronicle
from odyssey_megatron.execute.filling import Filling
from odyssey_megatron.execute.held import SlowLinks
from odyssey_megatron.execute.interpreter import Interpreter, Weights
from odyssey_megatron.execute.interrupted import Rest
from odyssey_megatron.execute.ledger import Ledger
from odyssey_megatron.execute.lookout import Lookout
from odyssey_megatron.execute.parts import FaultPoint, GroupBuilder, Groups, Member, Model
from odyssey_megatron.execute.position import CommonWork, Position
from odyssey_megatron.execute.regrouping import Regrouping
from odyssey_megatron.execute.step import StepAtHand, StepRunner
from odyssey_megatron.execute.timing import DeviceTime, Measurements, OwnTime, Stopwatch, link_times
from odyssey_megatron.execute.training import Training, asking_for_less
from odyssey_megatron.execute.votes import NUM_VOTES, Ballot
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.placing.groups import WORLD, holder_groups
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.assignment import Assignment
from odyssey_megatron.plan.sending.generation import Generation
from odyssey_megatron.policy.costs.measured import LinkTimes
from odyssey_megatron.rebuild import agree
from odyssey_megatron.rebuild.agree import Standing
from odyssey_megatron.recover import Phase


class RankRuntime:
    """Takes one rank from generation to generation. Implements ``recover.Rank``."""

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
        self.position = Position(first_step, model.end.num_totals + NUM_VOTES)
        self._lookout = Lookout(member, fault_point, self.position, self.chronicle)
        self._at_hand = StepAtHand(model, self._device, self.position, self.chronicle, self._lookout)
        self._groups = Regrouping(
            self._cell, build, decline=member.reports.decline, on_groups=on_groups, tagged=tagged_messages
        )
        self.ballot = Ballot(wants_end=lambda: member.liveness.asked == Ask.END, prepared=self._groups.ballot)
        self._assignment: Assignment | None = None
        """The assignment of the generation that this rank is in, from the phase GROUPS on."""
        self._training: Training | None = None
        """This rank's work in that generation, from the phase TRANSFER on and until the generation is aborted."""
        self._ran_out = False
        """Whether the last generation ended because this rank ran out of its device's memory."""
        member.on_offer(self._groups.prepare)

    # -- where it is ----------------------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """See ``recover.Rank``; the same goes for :attr:`done` and :attr:`own`."""
        return self.position.committed

    @property
    def done(self) -> int:
        return self.position.done

    @property
    def own(self) -> int:
        return self.position.own

    @property
    def is_over(self) -> bool:
        return self._groups.are_over and not self.position.applies

    @property
    def ends(self) -> bool:
        return self.position.votes.end > 0

    @property
    def boundary(self) -> int:
        return self._groups.boundary

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

    def holders_of(
        self, first: int, last: int, part: int, parts: int
    ) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
        """See ``Regrouping.holders_of``."""
        return self._groups.holders_of(self._assigned, first, last, part, parts)

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
            self._member.reports.ask_retry(self._groups.entered.number, str(why), out_of_memory=True)
            if self._at_hand.progress is not None:
                self._at_hand.progress.give_up()  # what is kept of the step takes memory
        if self._groups.holds is not None:
            # All ranks must end the generation together; otherwise one that has not heard would take the
            # leftovers of an aborted message for what was sent.
            self._member.await_newer(self._groups.entered.number, str(why))
        if self._training is not None:
            self._training.runner.abandon()
            self._training = None
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
        self.position.joins = assignment.is_fresh
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
        standings = agree.exchange(self._groups.world, self.position.standing(), fingerprint)
        self.chronicle.agreed()
        finished = agree.left_behind(standings)
        self._catch_up(standings)
        rest = Rest(begun=False)
        if generation.planned:  # a planned generation begins between two steps
            self._at_hand.forget()
        else:
            cell_group = self._groups.within_cell(self._cell.ranks)
            rest = self._at_hand.go_on(self._assigned, self._groups.world, cell_group)
            self._groups.entered.settle()
        self._groups.all_have_entered()
        # Nobody is ahead any more, and the blocks that hold these gradients may go.
        self.position.begin()
        again = rest.begun and rest.program is None
        outcome = "redo" if again else "finish" if finished and not rest.begun else "resume"
        self.chronicle.goes_on(outcome, rest.taken_up)

    def _catch_up(self, standings: Sequence[Standing]) -> None:
        """Bring this rank to where the others are: it finishes the piece of common work that they have, or joins.

        A rank that joins takes over the others' position, totals and loss scale.
        """
        position, scale = self.position, self._model.loss_scale
        ahead = agree.furthest(standings)
        known = agree.told(self._groups.world, standings, torch.cat([position.totals, scale.state().cpu()]))
        totals, scale_state = known.tensor_split([len(position.totals)])
        if position.joins:
            position.take_over(ahead, totals)
            self._model.end.take_over(totals[:-NUM_VOTES], position.committed, scale_state)
        elif position.done == ahead.done:
            return
        elif position.complete is CommonWork.STEP:
            self._at_hand.commit(totals)
        else:
            position.finish()

    def transfer(self, generation: Generation, live: Callable[[], None]) -> None:
        assignment, model = self._assigned, self._model
        model.holdings.take_cell(assignment.cell)
        if assignment.is_first:
            model.holdings.create_layers(assignment.held, assignment.kept)
            self._measured.link = self._link_times(assignment)
        # A rank that joins, and finds no memory, fails as it did before it joined: the others need no other plan.
        with nullcontext() if assignment.is_fresh else asking_for_less(self.committed):
            self._move_in(assignment, live)
        self.chronicle.started(self.committed)

    def _link_times(self, assignment: Assignment) -> LinkTimes | None:
        """Time the link to the rank that this one is to time it with; None if there is none."""
        other = assignment.timed_with
        if other is None:
            return None
        ((name, ranks),) = assignment.timed_group.items()
        if self._tagged:
            name, ranks = WORLD, assignment.generation.members
        message = self._model.compute.empty_message()
        return link_times(self._groups.entered[name], ranks.index(other.rank), other.worker, message)

    def _move_in(self, assignment: Assignment, live: Callable[[], None]) -> None:
        model = self._model
        self._slow.times = self._measured.link or self._slow.times
        channels = Channels(
            self._groups.entered,
            cells=assignment.cells,
            num_layers=assignment.layout.num_layers,
            tagged=self._tagged,
            cuts=model.cuts_activations,
            slices=bool(assignment.layout.keepers),
            slow=self._slow,
        )
        filling = Filling(
            assignment,
            model,
            self._groups,
            channels,
            checkpoint=lambda: self._lookout.check(Phase.TRANSFER.value),
            live=live,
            filled=lambda waited_s: self.chronicle.filled(self.committed, waited_s),
        )
        if not filling.may_wait:
            filling.finish()
        if not assignment.generation.planned:
            self._groups.part(together=False)
        with torch.enable_grad():  # an evaluation runs without; it may have been cut short
            model.take_layout(assignment.layout, assignment.worker)
        interpreter = self._interpreter(channels, filling.prepare_spreading())
        self._training = Training(
            assignment=assignment,
            runner=StepRunner(assignment, model, interpreter, self.position, self._measured),
            filling=filling,
            cell=self._cell,
            member=self._member,
            model=model,
            groups=self._groups,
            position=self.position,
            at_hand=self._at_hand,
            ballot=self.ballot,
            lookout=self._lookout,
            chronicle=self.chronicle,
            measured=self._measured,
            slow=self._slow,
            times_links=self._times_links,
        )
        # A failure may have cut some holders off from the weights of the last step.
        self._training.spread_weights()

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

    # -- the phase TRAIN ------------------------------------------------------------------------------------------

    @property
    def training(self) -> Training:
        """What this rank does in the generation that it is in, from the phase TRANSFER on."""
        assert self._training is not None
        return self._training

    def run_step(self, generation: Generation) -> None:
        self.training.run_step()

    def settle(self) -> None:
        self.training.settle()

    def together(self, work: Callable[[dist.ProcessGroup], None]) -> None:
        self.training.together(work)
