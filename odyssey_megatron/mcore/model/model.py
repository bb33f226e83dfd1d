"""The Megatron model of one rank: what the interpreter computes with, and what a recovery moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import NotFinite, TransferIncomplete
from odyssey_megatron.execute.interpreter import Needs, Passed
from odyssey_megatron.execute.ledger import Word
from odyssey_megatron.execute.scatter import Slices
from odyssey_megatron.mcore.loop import outcome
from odyssey_megatron.mcore.loop.data import MicrobatchSource
from odyssey_megatron.mcore.loop.microbatches import Microbatches
from odyssey_megatron.mcore.loop.outcome import StepOutcome
from odyssey_megatron.mcore.model import by_context, cut_off, groups, lanes, needed, span, summed, te
from odyssey_megatron.mcore.model.assembling import assembled, unsent
from odyssey_megatron.mcore.model.clipping import clipped
from odyssey_megatron.mcore.model.future import FutureTokens
from odyssey_megatron.mcore.model.holdings import Holdings
from odyssey_megatron.mcore.model.layers import LayerBlock, ModelSpec, block_with, build_part, lend
from odyssey_megatron.mcore.model.logits import LargestLogit
from odyssey_megatron.mcore.model.loss_scale import LossScale
from odyssey_megatron.mcore.model.optimizer import LearningRate
from odyssey_megatron.mcore.model.tally import Tally
from odyssey_megatron.mcore.model.wgrad import Flight, Flights, WeightGrads
from odyssey_megatron.mcore.pinned import to_device
from odyssey_megatron.names import step_name
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.resume import Visit
from odyssey_megatron.plan.schedule import Instr
from odyssey_megatron.plan.slices import EVERYTHING, firsts
from odyssey_megatron.upstream import compat

_ALONE = Cell(rank=0)
ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Callable[..., Any] | None]]
"""Megatron's: (data_iterator, model) -> (output, loss_func)."""


class MegatronModel(Holdings):
    """The held layers, the blocks made of them, and the step's state. Implements ``execute.interpreter.Compute``."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        forward_step: ForwardStep | None = None,
        source: MicrobatchSource | None = None,
        learning_rate: LearningRate | None = None,
        num_microbatches: int,
        replicas: int = 1,
        seq_length: int,
        micro_batch_size: int,
        loss_names: Sequence[str] = ("lm loss",),
        spare_on_host: bool = False,
        groups_of_cell: ProcessGroupCollection | None = None,
        cell: Cell = _ALONE,
        world_size: int = 1,
        cuts_activations: bool | None = None,
    ):
        """``groups_of_cell``: Megatron's groups for the ``cell`` that this rank is in.

        ``cuts_activations``: whether ranks of a whole cell have a piece of an activation each (sequence parallelism);
        None: as this cell's config says.

        ``spare_on_host``: optimizer state that is kept only for a failure lies in host memory between steps.

        ``replicas``: the launch line's data parallelism. With a loss scale, gradients are as large as Megatron's there.
        """
        te.prepare(spec.config)
        span.install()
        super().__init__(spec, cell, groups_of_cell or groups.initialize(data_parallel=spec.looks_ahead))
        self.forward_step, self.learning_rate = forward_step, learning_rate
        self.microbatches = Microbatches(
            cell,
            self._seeds,
            num_microbatches=num_microbatches,
            micro_batch_size=micro_batch_size,
            source=source,
        )
        config = spec.config
        self.loss_scale = LossScale(spec.optimizer_config, ends_job=spec.overflow_ends_job)
        config.grad_scale_func = self.loss_scale.scaled
        self._replicas = replicas if self.loss_scale and not config.calculate_per_token_loss else 1
        self.share = 1.0 / self._replicas
        self.loss_names, self._spare_on_host = tuple(loss_names), spare_on_host
        self._tp_rank, self._cp_rank = self._groups.tp.rank(), self._groups.cp.rank()
        self._losses_of_one = 1 if config.calculate_per_token_loss else self._groups.cp.size()
        """Losses per microbatch: a mean for each part of its sequence, which Megatron averages, or one sum."""
        self.cuts_activations = config.sequence_parallel if cuts_activations is None else cuts_activations
        parts = self._groups.tp_cp if config.sequence_parallel else self._groups.cp
        length, *rest = spec.activation_shape(seq_length, micro_batch_size, parts.size())
        self._message_shape = (length * len(cell.held_lanes), *rest)
        self._flights = Flights()
        self.future = FutureTokens(config)
        self.logits = LargestLogit(config, cell.rank, world_size)
        self._tally = Tally(self.loss_names, self.future, self.routing)
        self._training = True

    @property
    def blocks(self) -> list[LayerBlock]:
        """This worker's chunks of Megatron's model, in the order of their layers."""
        return [self._blocks[span] for span in sorted(self._blocks) if self._blocks[span].is_chunk]

    # -- layout ---------------------------------------------------------------------------------------------------

    def stand_in(self) -> None:
        """Make an unused block of one transformer layer before this rank has joined: code that expects a model finds
        one, and first-time costs of building layers are paid before others wait for it.
        """
        self.expect({1: (EVERYTHING,)})
        nobody: tuple[int, ...] = ()
        holders = tuple((0,) if layer == 1 else nobody for layer in range(self.spec.num_layers))
        self.take_layout(Layout(holders=holders, routes=()), worker=0)
        blocks = self._blocks
        self.forget()
        self._blocks = blocks

    def idle_block(self) -> LayerBlock:
        """A block of one transformer layer that this worker does not hold, for Megatron's code to look at."""
        parts = build_part(self.spec, 1, self._groups)
        return LayerBlock(self.spec, [self._hold(1, parts)], self._groups)

    def forget(self) -> None:
        """Hold nothing from now on: what this rank was sent in a generation that failed is out of date."""
        self.discard_incoming()
        self._held.clear()
        self._blocks = {}
        self._flights.clear()
        self._layout = Layout(holders=(), routes=())

    def take_layout(self, layout: Layout, worker: int) -> None:
        """Assemble this worker's blocks. Blocks with the same layers are kept, and gradients are kept in any case.

        Raises:
            TransferIncomplete: a layer is neither held nor received.
        """
        self._held.update(self._arriving.take_layers())
        if lacking := unsent(
            layout, worker, self._held, lambda layer: self._arriving.state(layer) is not None
        ):
            raise TransferIncomplete(f"worker {worker} was not sent layer(s) {lacking}")
        for layer in layout.held_by(worker):
            if layer not in self._held:  # only its weights are needed, which arrive as after every step
                self._held[layer] = self._hold(layer, build_part(self.spec, layer, self._groups))
        before, self._blocks = self._blocks, {}
        self._blocks = assembled(
            layout,
            worker,
            self._held,
            before,
            make=lambda layers: LayerBlock(self.spec, layers, self._groups),
            replacing=self._flights.flush_bound,
        )
        self._parts.forget()
        self._layout, self._worker = layout, worker
        lend(self.blocks, self._held)

    # -- one step -------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Forget whatever an earlier attempt left, and zero the gradients."""
        self.microbatches.begin(step)
        self._begin(training=True)
        self._look_ahead()  # now, since whoever computes heads has to wait for its first activation anyway
        self._parts.forget()
        self.logits.begin(self.layers)
        for block in self._blocks.values():
            block.zero_gradients()

    def microbatches_of(self, step: int) -> int:
        """The number of microbatches of ``step`` as a plan counts them: one for all lanes of a cell."""
        return self.microbatches.of_plan(step)

    def begin_evaluation(self, first: int, microbatches: int) -> None:
        """Begin an evaluation of ``microbatches`` of the source from ``first`` on; nothing is kept for a backward."""
        self.microbatches.begin_evaluation(first, microbatches)
        self._begin(training=False)

    def _begin(self, *, training: bool) -> None:
        self._training = training
        self._flights.clear()
        self._tally.clear()
        for block in self._blocks.values():
            if block.model.training != training:
                block.model.train(training)

    def _look_ahead(self) -> dict[int, int]:
        """Look at the next step's microbatches whose heads would run here; maps each to the first of its route."""
        if self._tp_rank or self._cp_rank:
            return {}
        return self.microbatches.look_ahead(self._layout, self._worker)

    def forward(
        self,
        microbatch: int,
        first: int,
        last: int,
        activation: torch.Tensor | None,
        *,
        ahead: bool = False,
        needs: Needs = None,
    ) -> torch.Tensor:
        if activation is not None and self._training:
            activation.requires_grad_()
        output = lanes.in_turn(
            self.cell,
            activation,
            lambda lane: self.microbatches.go_to(microbatch, lane),
            lambda number, rows: self._forward_of_lane(number, first, last, rows, ahead=ahead, needs=needs),
            back=lambda lane: self._back_to(microbatch, lane),
        )
        if self._training:
            self._flights[self.microbatches.go_to(microbatch), first] = Flight(
                activation, output, WeightGrads(), last - first
            )
        return output

    def _back_to(self, microbatch: int, lane: int) -> None:
        """Go on in ``lane`` of the plan's ``microbatch``, in the middle of its backward."""
        self.microbatches.go_to(microbatch, lane)
        self.loss_scale.beside(counts=not self.microbatches.is_idle)

    def _forward_of_lane(
        self,
        microbatch: int,
        first: int,
        last: int,
        activation: torch.Tensor | None,
        *,
        ahead: bool,
        needs: Needs,
    ) -> torch.Tensor:
        """Run one microbatch forward; ``microbatch`` is its number in the step, and it is the current one."""
        self.future.taken()  # drops what an interrupted forward has left
        tensor, tokens, reported = activation, torch.empty(0), list[dict[str, torch.Tensor]]()
        sums_losses = self.spec.config.calculate_per_token_loss
        for block in self._span(first, last):
            is_last_stage = block.last == self.spec.num_layers
            stage = groups.in_stage(*self.spec.reads_as(first=block.first == 0, last=is_last_stage))
            with cut_off.tidied(self.spec.config, self._held.values()), stage, needed.asking(needs):
                self._seeds.reseed_script()
                tensor, tokens = schedules.forward_step(
                    by_context.forward_step_of(self.cell, self.forward_step, sums_losses=sums_losses),
                    self.microbatches.source,
                    block.model,
                    self.microbatches.count * self._losses_of_one // self._replicas,
                    tensor,
                    reported,
                    self.spec.config,
                    cp_group_size=self._groups.cp.size(),
                    current_microbatch=microbatch,
                    is_last_stage=is_last_stage,
                )
        assert tensor is not None
        # Blocks before the head have no losses; that is known on the host, without asking the device.
        if not self.microbatches.is_idle:
            self._tally.add(microbatch, first, last, tokens, self._tally.read(reported), ahead=ahead)
        return tensor

    def adopt(self, visits: Collection[Visit]) -> None:
        ours = {(one, first) for place, first, _ in visits for one in self.microbatches.in_all_lanes(place)}
        for place in self._tally.adopt(ours):
            self._flights.pop(place, None)

    def kept(self, microbatch: int, first: int, last: int) -> None:
        if not self._training:
            return
        output = self._flights[self.microbatches.go_to(microbatch), first].output
        schedules.deallocate_output_tensor(output, self.spec.config.deallocate_pipeline_outputs)

    def undo(self, visits: Collection[Visit]) -> None:
        for microbatch, first, last in visits:
            for number in self.microbatches.in_all_lanes(microbatch):
                self._flights.pop((number, first), None)
                self._tally.undo(number, first, last, with_losses=last == self.spec.num_layers)

    def input_grad(
        self,
        microbatch: int,
        first: int,
        last: int,
        grad: torch.Tensor | None,
        *,
        word: Word = None,
        passed: Passed | None = None,
    ) -> torch.Tensor | None:
        def on_the_way(layer: int) -> None:
            assert passed is not None
            if self.microbatches.in_first_lane:
                passed(layer)
                self.microbatches.go_to(microbatch)  # switch back, since recomputation draws random numbers

        if passed is not None:
            passed(last)
        flight = self._flights[self.microbatches.go_to(microbatch), first]
        collecting = flight.weight_grads.collecting(on_the_way if passed else None)
        with cut_off.tidied(self.spec.config, self._held.values()), collecting, self.loss_scale.only_if(word):
            return compat.backward_step(flight.activation, flight.output, grad, self.spec.config)

    def weight_grad(self, microbatch: int, first: int, last: int) -> None:
        self._flights.finish(self.microbatches.go_to(microbatch), first, last, self.layers)

    def gradients(self, first: int, last: int, part: int) -> Sequence[torch.Tensor]:
        return summed.gradients(self._block(first, last), self._parts, first, last, part)

    def expert_gradients(self, first: int, last: int, part: int) -> Sequence[torch.Tensor]:
        return summed.expert_gradients(self._block(first, last), self._parts, first, last, part)

    def slices(self, first: int, last: int, part: int) -> Sequence[Slices]:
        block = self._block(first, last)
        return summed.slices(block, self._parts, self._layout, first, last, part, spread=False)

    def expert_slices(self, first: int, last: int, part: int) -> Sequence[Slices]:
        block = self._block(first, last)
        return summed.slices(block, self._parts, self._layout, first, last, part, spread=True)

    def partial_gradients(self, first: int, last: int, part: int) -> Sequence[torch.Tensor]:
        return summed.partial_gradients(self._block(first, last), self._parts, first, last, part)

    def _block(self, first: int, last: int) -> LayerBlock:
        return block_with(self._blocks.values(), first, last)

    def take_sums(self) -> None:
        self._parts.take_sums()

    def empty_message(self) -> torch.Tensor:
        return torch.empty(
            self._message_shape, dtype=self.spec.config.pipeline_dtype, device=torch.cuda.current_device()
        )

    def _span(self, first: int, last: int) -> list[LayerBlock]:
        blocks = [b for (a, z), b in sorted(self._blocks.items()) if first <= a and z <= last]
        assert blocks, (first, last)
        assert (blocks[0].first, blocks[-1].last) == (first, last)
        return blocks

    # -- the step's end (I3, I4) ----------------------------------------------------------------------------------

    @property
    def num_totals(self) -> int:
        return sum(self._sizes_of_totals)

    @property
    def _sizes_of_totals(self) -> list[int]:
        """Sizes of the step's own totals, of routers', of logits', and of what is known of the next step."""
        own = [part.num_totals for part in (self.routing, self.logits, self.microbatches.balance)]
        return [outcome.num_totals(self._tally.names), *own]

    def take_over(self, totals: torch.Tensor, step: int, scale: torch.Tensor) -> None:
        """On a rank that joins, take over what all ranks have alike besides layers: the totals of the step before
        ``step``, and the state of the loss scale.
        """
        self.microbatches.balance.take(torch.split(totals, self._sizes_of_totals)[-1], step)
        self.loss_scale.take_over(scale)

    def local_totals(self) -> torch.Tensor:
        """This rank's share of the step's totals. Only the first holder of a block counts its gradient (the first owner
        of a slice, where state is cut), and only the ranks that ran a microbatch's head count the microbatch.
        """
        layout, worker = self._layout, self._worker
        if layout.keepers:
            counted = [
                one
                for layer in self.layers
                for one in outcome.counted_numbers(
                    layer, firsts(layout.states[layer.index]).get(worker, ()), self.cell
                )
            ]
        else:
            own = [block for block in layout.blocks() if block.holders[0] == worker]
            blocks = [self._blocks[block.first, block.last] for block in own]
            counted = [one for block in blocks for one in outcome.counted_gradients(block, self.cell)]
        totals = outcome.local_totals(
            counted,
            self._tally.losses,
            self._tally.names,
            tokens=self._tally.tokens.values(),
            sequences=source.sequences if (source := self.microbatches.source) is not None else {},
            cell=self.cell,
            with_zeros=self.spec.optimizer_config.log_num_zeros_in_grad,
        )
        ahead = self.microbatches.balance.local_totals(self._look_ahead(), speaks=self.cell.lane == 0)
        logits = self.logits.local_totals(self.layers)
        return torch.cat([totals, self.routing.local_totals(), logits, to_device(ahead)])

    def timed(self, took_s: Callable[[], Mapping[Instr, float]]) -> None:
        """Report the times ``took_s`` that this rank's instructions took in a step that is over."""
        self.microbatches.balance.timed(took_s)

    def squared_weights(self) -> torch.Tensor:
        """This rank's share of the sum of all squared parameters; the first keeper of a slice counts it."""
        counted = ((one, firsts(self._layout.states[one.index]).get(self._worker, ())) for one in self.layers)
        return outcome.squared_weights(counted, self.cell)

    def local_losses(self) -> torch.Tensor:
        """The losses of this rank's share of the evaluated microbatches; summed over ranks they are a table of all."""
        losses = self._tally.losses if self._tp_rank == 0 else {}
        return outcome.loss_table(losses, self.loss_names, self.microbatches.count, self.cell)

    def apply(self, totals: torch.Tensor, checkpoint: Callable[[], None]) -> StepOutcome:
        """Make the optimizer step from reduced gradients and everyone's totals; sends nothing.

        Raises:
            NotFinite: the same on every rank, before any weight has changed.
        """
        totals, routed, logits, ahead = torch.split(totals, self._sizes_of_totals)
        batches, balance, step = self.microbatches.batches, self.microbatches.balance, self.microbatches.step
        seen = balance.seen
        balance.take(ahead, step + 1)
        squared_norm, zeros, tokens, microbatches, lengths, squares, *losses = totals.tolist()
        if step in batches.left_out:
            self._let_go()
            return self._leave_out()
        config = self.spec.optimizer_config
        gradient = clipped(
            squared_norm,
            loss_scale=self.loss_scale.value.item() if self.loss_scale else 1.0,
            tokens=tokens if self.spec.config.calculate_per_token_loss else 1.0,
            clip_grad=config.clip_grad,
        )
        skipped = not gradient.is_finite
        if skipped and not self.loss_scale.skips:
            raise NotFinite(
                f"{step_name(step)}: the gradient norm is {gradient.norm}. No weight was changed. Lower --lr, or "
                "look at the samples of this step in the journal."
            )
        self._let_go()
        assert self.learning_rate is not None
        kept = {at: layer.optimizer for at, layer in self._held.items() if layer.optimizer is not None}
        lr = self.learning_rate.set(list(kept.values()), step, batches, self.loss_scale)
        spare = self._layout.spare_states(self._worker) if self._spare_on_host else {}
        for index, optimizer in kept.items():
            if not skipped:
                optimizer.apply(gradient.scale)
            optimizer.park(spare.get(index, ()))
            checkpoint()
        self.routing.balance(self._held, routed)  # after a skipped step, too
        self.loss_scale.update(skipped=skipped, samples=batches.size(step))
        return StepOutcome(
            losses=outcome.means(losses, self._tally.names),
            grad_norm=None if skipped else gradient.norm,
            lr=lr,
            skipped=skipped,
            num_zeros_in_grad=int(zeros) if config.log_num_zeros_in_grad and not skipped else None,
            tokens=int(tokens),
            num_microbatches=int(microbatches),
            sequences=(lengths, squares) if lengths else (None, None),
            aux_losses=self.routing.losses(routed),
            max_attention_logit=self.logits.largest(logits),
            dealt=seen,
        )

    def _let_go(self) -> None:
        """Drop what the current layout does not need: its step is agreed on, and nobody returns to an earlier one."""
        keeps = self._layout.kept_by(self._worker)
        for layer in self.layers:
            layer.former.clear()  # from now on only others keep these up to date
            if layer.index not in keeps:
                layer.optimizer = None
        self._held = {layer.index: layer for layer in self.layers}

    def _leave_out(self) -> StepOutcome:
        """End a step that trains on nothing, and does not count in the learning rate's schedule."""
        assert self.learning_rate
        batches, step = self.microbatches.batches, self.microbatches.step
        lr = self.learning_rate.set([], step, batches, self.loss_scale)
        self.loss_scale.leave_out(batches.size(step))
        return StepOutcome(lr=lr, skipped=True)

    def samples_of_losses(self) -> dict[int, list[int]]:
        """Microbatch -> its samples, for those whose loss this rank computed in this step as the first of its lane."""
        source = self.microbatches.source
        assert source is not None
        fetched, ours = source.fetched, () if self._groups.tp_cp.rank() else sorted(self._tally.losses)
        return {microbatch: fetched[microbatch] for microbatch in ours if microbatch in fetched}
