"""What a rank does in each phase of a generation: the doing behind ``recover.py``. No Megatron, no opinions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import Fenced, PeerFailed, Superseded
from odyssey_megatron.execute.channels import Channels
from odyssey_megatron.execute.chronicle import Chronicle
from odyssey_megatron.execute.held import SlowLinks
from odyssey_megatron.execute.interpreter import FORWARD_ONLY, Interpreter
from odyssey_megatron.execute.ledger import Ledger
from odyssey_megatron.execute.left_out import dispensable, leave_out
from odyssey_megatron.execute.neighbours import Neighbours
from odyssey_megatron.execute.parts import FaultPoint, GroupBuilder, Groups, Member, Model, NoGroups
from odyssey_megatron.execute.prepare import Offers, elected
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.execute.suspects import Exchange, examine, renumbered
from odyssey_megatron.execute.timing import DeviceTime, Measurements, OwnTime, Stopwatch, Trace, link_times
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.names import step_name
from odyssey_megatron.plan import groups as membership
from odyssey_megatron.plan.generation import Generation
from odyssey_megatron.plan.groups import WORLD
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.schedule import Program
from odyssey_megatron.plan.smaller import StepPlan, smaller
from odyssey_megatron.plan.transfer import needed_at_once
from odyssey_megatron.rebuild import agree
from odyssey_megatron.rebuild.transfer import Moving, Spreading
from odyssey_megatron.recover import Phase


class Votes(NamedTuple):
    """Behind the model's totals of a step: sums over all ranks, and so the same on all of them."""

    end: float
    """How many want the job to end."""
    writing: float
    """How many write a checkpoint, beside training."""
    ballots: float
    """See ``prepare.elected``."""
    squares: float
    missing: float
    """Instructions that have counted for nothing."""


_VOTES = len(Votes._fields)


class RankRuntime:
    """Implements ``recover.Rank``."""

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
        """``device``: where the model is, if not where ``config`` says."""
        self._on_groups = on_groups
        self._config, self._member, self._model, self._build = config, member, model, build
        self._tagged, self._fault_point = tagged_messages, fault_point
        stopwatch = stopwatch or (DeviceTime() if config.device == "cuda" else OwnTime())
        self._measured = Measurements(config.profile_steps, slowness, member.incarnation, stopwatch)
        self.chronicle = Chronicle(
            journal, member, self._measured, on_commit=on_commit, trace_steps=config.trace_steps
        )
        self.committed = first_step
        self.done = 0
        """Pieces of common work that the job has done: steps, and what :meth:`together` did."""
        self.own = 0
        """Of those, how many this rank has had a part in."""
        self._joins = self._ready = self._in_step = self._evaluating = False
        self._device = torch.device(device or config.device)
        self._totals = torch.zeros(model.num_totals + _VOTES, dtype=torch.float64)
        """Of the last step that was agreed on; on the host, as the agreement is."""
        self.wants_end: Callable[[], bool] = lambda: member.asked == Ask.END
        self.writes: Callable[[], bool] = lambda: False  # a checkpoint, beside training
        self.outcome: Any = None
        """Of the last committed step."""
        self._groups: Groups | None = None
        self._left: Groups | None = None
        """Of the generation before, until all its members are in the next one."""
        self._offers = Offers[Groups](member.decline)
        self._moving: Moving | None = None
        self._spreading: Spreading | None = None
        self._live: Callable[[], None] = lambda: None
        member.on_offer(self._prepare)
        self._interpreter: Interpreter | None = None
        self._slow = SlowLinks(slow_links)
        self._program: Program = ()
        self._progress: Progress | None = None
        """Of the step at hand; None where it has not begun, or must begin anew."""
        self._rest: Program | None = None
        """What is left to do of an interrupted step, if it goes on."""
        self.boundary = self.generation = 0
        self._plan: Plan | None = None
        self._cell = cell or Cell(rank=member.rank)
        self._worker = self._cell.worker

    # -- phases ---------------------------------------------------------------------------------------------------

    def enter_phase(self, phase: Phase) -> None:
        self.chronicle.clock.enter(phase)
        if phase is Phase.ABORT:
            self._fault(phase.value, self.committed)

    @property
    def votes(self) -> Votes:
        """Of the last step."""
        return Votes(*self._totals[-_VOTES:].tolist())

    @property
    def is_over(self) -> bool:
        """See ``recover.Rank``."""
        return self._groups is not None and self._groups.holds is not None and not self._groups.holds.item()

    @property
    def ends(self) -> bool:
        """See ``recover.Rank``."""
        return self.votes.end > 0

    def _prepare(self, offered: Generation) -> None:
        """Builds the groups of ``offered`` behind the back of the steps. The watcher's thread."""
        if self._member.rank not in offered.members:  # its cell leaves, once all others are ready
            self._offers.prepare(offered.number, NoGroups)
            return
        mine = self._groups_in(offered)
        self._offers.prepare(offered.number, lambda: self._build(offered.number, mine))

    def _groups_in(self, generation: Generation) -> dict[str, tuple[int, ...]]:
        plan, members = generation.plan, generation.members
        shapes = dict(generation.shapes)
        groups = membership.group_members(plan, members, self._cell, shapes, tagged=self._tagged)
        if generation.previous is None and not self._tagged:
            groups |= membership.pair(members, self._cell.rank)
        return groups

    def abort(self, why: Exception) -> None:
        if self._interpreter is not None:
            self._interpreter.abandon()
            self._interpreter = None
        self._moving = self._spreading = None
        for groups in (self._groups, self._left):
            if groups is not None:
                groups.abort()
        if self._groups is not None and self._progress is not None:
            self._groups.drain()
            self._model.undo(self._progress.take_stock())
        if self._groups is not None:
            self._groups.leave()
        if self._left is not None:
            self._left.close()
        self._groups = self._left = None
        self._model.discard_incoming()

    def build_groups(self, generation: Generation) -> None:
        plan = generation.plan
        # Not verified once more: the coordinator did, and every rank would spend milliseconds of the stall on it.
        self.boundary = 0
        self._joins = self._member.rank in generation.fresh
        if self._joins:
            self._model.forget()
        self.chronicle.begin(generation)
        self.generation, self._plan = generation.number, plan
        self._fault(Phase.GROUPS.value, self.committed)
        prepared = self._offers.take(generation.number)
        if prepared is not None:
            self._left, self._groups = self._groups, prepared
        else:
            self.abort(Superseded("a newer generation came before the one that was prepared"))
            self._groups = self._build(generation.number, self._groups_in(generation))
        self.chronicle.in_groups(speaks=self._world.rank() == 0)
        self._on_groups(self._groups)

    def agree(self, generation: Generation) -> None:
        self._fault(Phase.AGREE.value, self.committed)
        plan, self._rest, taken_up = self.plan, None, 0
        mine = agree.Standing(done=self.done, ready=self._ready, committed=self.committed, joins=self._joins)
        fingerprint = int(generation.plan_hash, 16) % 2**40 + generation.number
        known = torch.cat([self._totals, self._model.loss_scale.state().cpu()])
        standings = agree.exchange(self._world, mine, fingerprint)
        self.chronicle.agreed()
        ahead, finished = agree.furthest(standings), agree.left_behind(standings)
        behind = finished and self.done < ahead.done
        totals, scale = agree.told(self._world, standings, known).tensor_split([len(self._totals)])
        if self._joins:
            self._joins, self.done, self.committed = False, ahead.done, ahead.committed
            self._totals = totals.clone()
            self._model.loss_scale.take_over(scale)
        elif behind and self._in_step:
            self._commit(totals)
        elif behind:
            self._piece_done()
        begun, keep = False, self._config.interrupted_step == "resume"
        if not generation.planned:
            cell_group, progress = self._group(membership.cell_group_name(self._cell.ranks)), self._progress
            progress, compute, device = progress or self._new_progress(), self._model, self._device
            now = self._of_step(plan.program(self._worker))
            begun, self._rest, taken_up = agree.go_on(
                self._world, cell_group, now, self._cell, progress, compute, device, keep=keep
            )
            assert self._groups is not None
            self._groups.settle()
        if self._rest is None:
            self._progress = None
        again = begun and self._rest is None
        if self._left is not None:  # everybody has left it by now
            self._left.close()
            self._left = None
        self._ready = False  # nobody is ahead any more, and the blocks with these gradients may go
        outcome = "redo" if again else "finish" if finished and not begun else "resume"
        self.chronicle.goes_on(outcome, taken_up)

    def _of_step(self, program: Program) -> StepPlan:
        return smaller(self.plan.layout, program, self._model.microbatches_of(self.committed))

    def _new_progress(self, *, keeps: bool = False) -> Progress:
        layout = self.plan.layout
        return Progress(layout.num_microbatches, layout.num_layers, keeps=keeps)

    def transfer(self, generation: Generation, live: Callable[[], None]) -> None:
        plan, model, self._live = self.plan, self._model, live
        kept = plan.layout.spans_kept_by(self._worker)
        self._program = plan.program(self._worker)
        groups, cell, num_layers = self._groups, self._cell, plan.layout.num_layers
        assert groups is not None
        if generation.previous is None:
            model.create_layers(plan.layout.held_by(self._worker), kept)
            pair = membership.pair(generation.members, self._cell.rank)
            for name in (WORLD,) if self._tagged else pair:
                self._measured.link = link_times(groups[name], model.empty_message())
        self._slow.times = self._measured.link or self._slow.times
        channels = Channels(
            groups,
            cell=cell,
            num_layers=num_layers,
            tagged=self._tagged,
            shapes=dict(generation.shapes),
            cuts=model.cuts_activations,
            slow=self._slow,
        )
        model.expect(kept)
        self._moving = Moving(
            plan.transfers,
            num_layers=num_layers,
            cell=cell,
            world=self._world,
            way=channels.of_transfer,
            tensors_to_send=model.tensors_to_send,
            tensors_to_fill=model.tensors_to_fill,
            filled=model.filled,
            checkpoint=lambda: self._check(Phase.TRANSFER.value, -1),
        )
        before = None if self._member.rank in generation.fresh else generation.previous
        held = before.held_by(self._worker) if before is not None else ()
        needed = needed_at_once(plan.layout, self._worker, self._program, held)
        if not (generation.planned and self._moving.arriving.isdisjoint(needed)):
            self._settle()
        with torch.enable_grad():  # an evaluation, which runs without, may have been cut short
            model.take_layout(plan.layout, self._worker)
        self._interpreter = Interpreter(
            model,
            channels,
            membership.holder_groups(self._group, cell, plan.layout.blocks()),
            tensor_group=self._group(membership.cell_group_name(cell.tensor_ranks)),
            num_layers=num_layers,
            checkpoint=self._check,
            ledger=Ledger(groups.holds, self._device, alone=self._cell.size == 1),
        )
        self._spreading = Spreading(
            plan.layout,
            cell=cell,
            world=self._world,
            group_of=self.holders_of,
            weights_of=model.weights_of,
            arrived=model.weights_arrived,
        )
        self._spread_weights()  # some may have been cut off from those of the last step
        self.chronicle.started(self.committed)

    def holders_of(self, first: int, last: int, place: int) -> dist.ProcessGroup:
        """The group of the holders of a block ``[first, last)``; of each all ranks that have the same of it as this one
        in a ``place`` that it fills.
        """
        assert self._groups is not None
        parts = self._cell.parts
        return self._groups[membership.block_group_name(first, last, place % parts, parts)]

    def _settle(self) -> None:
        """All state of the plan is here. Before anything that changes weights, or needs those that were sent."""
        if self._moving is None:
            return
        began_s = time.monotonic()
        self._moving.finish()
        assert self._groups is not None
        self._groups.settle()
        self._model.settled()
        self._moving = None
        self._live()
        self.chronicle.filled(self.committed, time.monotonic() - began_s)

    def run_step(self, generation: Generation) -> None:
        step = self.committed
        self._slow.begin(step)
        timed = (
            self._config.time_links == "on" and self._measured.measures(step) and self.chronicle.steps_here
        )
        if timed and self._interpreter is not None:
            self._fault("exchange", step)
            ways = self._interpreter.channels, self._interpreter.holder_groups
            neighbours = Neighbours(self._program, self.plan.layout, self._cell, *ways)
            self._measured.exchange(step, neighbours, self._model.empty_message())
        began_s, self._ready, self._in_step = time.monotonic(), False, True
        trace = self._measured.trace(step)
        if self._progress is None:
            self._model.begin_step(step)
            self._progress = self._new_progress(keeps=self._config.interrupted_step == "resume")
        self._run(self._progress, trace)
        totals = self._agreed(self._progress)
        if not torch.isfinite(totals).all() and not self._model.loss_scale.blames_nobody:
            totals = self._examined(totals, self._progress)
        self._commit(totals)
        votes = self.votes  # from the device, in one piece
        self.boundary = elected(votes.ballots, votes.squares, self._world.size())
        self._spread_weights()
        kept = self.plan.layout.kept_by
        self.chronicle.ended(
            step,
            trace,
            time.monotonic() - began_s,
            lambda: {layer: self._model.moved_bytes(layer) for layer in kept(self._worker)},
        )
        if self._member.asked == Ask.LEAVE:
            raise Fenced("its node was asked to leave the job, and does behind this step")

    def _run(self, progress: Progress, trace: Trace) -> None:
        """The step's program, or what is left of it."""
        rest, self._rest = self._rest, None
        program = self._of_step(self._program).program if rest is None else rest
        assert self._interpreter is not None
        try:
            self._interpreter.run(program, trace, progress)
        except torch.OutOfMemoryError as error:
            if rest is None:
                raise
            # What was in flight here came on top of what the plan keeps in flight. Done again, the step fits.
            progress.whole = False
            raise PeerFailed(f"no memory to go on with {step_name(self.committed)}: {error}") from error

    def _agreed(self, progress: Progress) -> torch.Tensor:
        """All gradients of the step are reduced here: everyone's totals, once they are everywhere."""
        self.chronicle.samples(self.committed, self._model.samples_of_losses())
        self._settle()
        self._check("agreement", -1)
        assert self._groups is not None
        own = self._model.local_totals()
        votes = torch.tensor([self.wants_end(), self.writes(), *self._offers.ballot()], dtype=own.dtype)
        # Here the host waits for its device, once a step: whoever enters the agreement has computed all of it.
        own = torch.cat([own, progress.missing(own.device).reshape(1)]).cpu()
        totals = torch.cat([own[:-1], votes, own[-1:]])
        self._groups.settle()
        self._ready = True
        dist.all_reduce(totals, group=self._world)
        if missing_somewhere := int(totals[-1].item()):
            raise PeerFailed(
                f"{missing_somewhere} instruction(s) of {step_name(self.committed)} counted for nothing"
            )
        return totals

    def _examined(self, totals: torch.Tensor, progress: Progress) -> torch.Tensor:
        """The totals to go on with, of a step whose numbers are not finite; whoever computes wrongly leaves the job."""
        layout = self._member.with_all_routes(self.generation, self.plan.layout)
        layout = smaller(layout, (), self._model.microbatches_of(self.committed)).layout
        progress.give_up()

        def again(exchange: Exchange) -> tuple[Progress, bool]:
            nonlocal totals
            self._ready = False
            self._model.begin_step(self.committed)
            program = self._of_step(self._program).program
            trial, self._rest = self._new_progress(), renumbered(program, exchange)
            self._run(trial, self._measured.trace(self.committed))
            totals = self._agreed(trial)
            return trial, bool(torch.isfinite(totals).all())

        wrong = examine(layout, self._cell, self._world, progress, again)
        self._leave_out(wrong, self.committed)
        return totals

    def _leave_out(self, wrong: Mapping[int, str], step: int) -> None:
        """Collective: whoever's numbers are wrong leaves the job, unless it cannot do without him."""
        if wrong and dispensable(self.plan.layout, wrong):
            leave_out(wrong, self._world, self._cell, step, self.chronicle.event)

    def evaluate(self, first: int, microbatches: int) -> None:
        """So many ``microbatches``, at most those of a plan, from ``first`` on through the layers, forward only."""
        assert self._interpreter is not None
        self._model.begin_evaluation(first, microbatches)
        self._evaluating = True
        try:
            with torch.no_grad():
                program = smaller(self.plan.layout, self._program, microbatches).program
                forward_only = [one for one in program if one.op in FORWARD_ONLY]
                trace = self._measured.trace(self.committed)
                self._interpreter.run(forward_only, trace, self._new_progress())
        finally:
            self._evaluating = False

    def together(self, work: Callable[[dist.ProcessGroup], None]) -> None:
        self._ready = self._in_step = False
        self._settle()
        work(self._world)
        self._check("", -1)
        self._ready = True
        dist.barrier(group=self._world)
        self._piece_done()

    def check_holders(self, world: dist.ProcessGroup) -> None:
        """Work for :meth:`together`: whoever has other bytes of a layer than most of its holders leaves the job."""
        self._leave_out(self._model.odd_holders(world, rank=self._cell.rank), self.committed - 1)

    def _piece_done(self) -> None:
        self.done, self.own = self.done + 1, self.own + 1
        self._ready = self._in_step = False

    # -- inside a step --------------------------------------------------------------------------------------------

    def _check(self, point: str, microbatch: int) -> None:
        """Before every instruction: has the generation ended? Is a fault due?"""
        if self._member.newer_than(self.generation):
            raise Superseded(f"generation {self.generation} has ended")
        self.chronicle.trains(self.committed)
        if point:
            self._fault("evaluate" if self._evaluating else point, self.committed, microbatch)

    def _fault(self, point: str, step: int, microbatch: int = -1) -> None:
        self._fault_point(point, step=step, generation=self.generation, microbatch=microbatch)

    def _commit(self, totals: torch.Tensor) -> None:
        """From here to the end nothing is sent and nothing can be cut short: whoever has the totals finishes (I5)."""
        step = self.committed
        if self._progress is not None:
            self._progress.agreed()
        self.outcome = self._model.apply(totals[:-_VOTES], lambda: self._fault("optimizer", step))
        self._totals, self.committed = totals.clone(), step + 1
        self._piece_done()
        self.chronicle.committed(step, self.outcome)
        self._progress = None
        self._fault("commit", step)

    def _spread_weights(self) -> None:
        """From the first keeper of each slice to the holders that do not keep its optimizer state.

        Whoever is cut off here by a failure is committed all the same: the keepers have what it lacks, and the next
        generation begins with this.
        """
        if self._spreading:
            self._fault("param_gather", self.committed - 1)
            self._spreading.run()

    @property
    def _world(self) -> dist.ProcessGroup:
        if self._groups is None:
            raise Superseded("no groups")
        return self._groups[WORLD]

    def _group(self, name: str) -> dist.ProcessGroup | None:
        """Of this generation, if this rank is in it."""
        assert self._groups is not None
        return self._groups[name] if name in self._groups else None

    @property
    def plan(self) -> Plan:
        """Of the generation that this rank is in."""
        assert self._plan is not None
        return self._plan
