"""The forwards and backwards of a step's microbatches through the blocks that this rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.execute.interpreter import Needs, Passed
from odyssey_megatron.execute.ledger import Word
from odyssey_megatron.mcore.loop.microbatches import Microbatches
from odyssey_megatron.mcore.model import by_context, cut_off, groups, lanes, needed, scripted
from odyssey_megatron.mcore.model.holdings import Holdings
from odyssey_megatron.mcore.model.loss_scale import LossScale
from odyssey_megatron.mcore.model.tally import Tally
from odyssey_megatron.mcore.model.wgrad import Flight, Flights, WeightGrads
from odyssey_megatron.plan.scheduling.resume import Visit
from odyssey_megatron.upstream import compat

ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Callable[..., Any] | None]]
"""Megatron's: (data_iterator, model) -> (output, loss_func)."""


class Passes:
    """Runs microbatches through this rank's blocks, and keeps what is in flight. Implements
    ``execute.interpreter.Compute``.
    """

    def __init__(
        self,
        holdings: Holdings,
        microbatches: Microbatches,
        loss_scale: LossScale,
        tally: Tally,
        *,
        forward_step: ForwardStep | None,
        replicas: int,
        seq_length: int,
        micro_batch_size: int,
    ):
        """``replicas``: each loss is divided by the number of microbatches of one of so many replicas; the sums of
        gradients make up for it (``Sums.share``).
        """
        self._holdings, self._microbatches = holdings, microbatches
        self._loss_scale, self._tally, self._replicas = loss_scale, tally, replicas
        self.forward_step = forward_step
        holdings.spec.config.grad_scale_func = loss_scale.scaled
        self._config, self._context_size = holdings.spec.config, holdings.groups.cp.size()
        self._losses_of_one = 1 if self._config.calculate_per_token_loss else self._context_size
        """Losses per microbatch: a mean for each part of its sequence, which Megatron averages, or one sum."""
        parts = holdings.groups.tp_cp if self._config.sequence_parallel else holdings.groups.cp
        length, *rest = holdings.spec.activation_shape(seq_length, micro_batch_size, parts.size())
        self._message_shape = (length * len(holdings.cell.held_lanes), *rest)
        self._flights = Flights()
        self._training = True

    def begin(self, *, training: bool) -> None:
        """Forget whatever an earlier attempt left; begin a step, or an evaluation, of which nothing is kept for a
        backward.
        """
        self._training = training
        self._flights.clear()
        self._tally.clear()
        for block in self._holdings.blocks.values():
            if block.model.training != training:
                block.model.train(training)

    def flush_bound(self) -> None:
        """Run the weight gradients that go to buffers which are about to be replaced."""
        self._flights.flush_bound()

    def drop_flights(self) -> None:
        self._flights.clear()

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
            self._holdings.cell,
            activation,
            lambda lane: self._microbatches.go_to(microbatch, lane),
            lambda number, rows: self._forward_of_lane(number, first, last, rows, ahead=ahead, needs=needs),
            back=lambda lane: self._back_to(microbatch, lane),
        )
        if last < self._holdings.spec.num_layers and output.numel() != math.prod(self._message_shape):
            # Whoever receives it has room for just so much, and would compute with what else lies there.
            samples = self._microbatches.source.fetched if self._microbatches.source is not None else {}
            raise ConfigError(
                f"microbatch {microbatch}, samples {samples.get(microbatch, 'unknown')}: activations have the shape "
                f"{list(output.shape)}, and {list(self._message_shape)} by seq_length and micro_batch_size. All "
                "samples must have that length."
            )
        if self._training:
            self._flights[self._microbatches.go_to(microbatch), first] = Flight(
                activation, output, WeightGrads(), last - first
            )
        return output

    def _back_to(self, microbatch: int, lane: int) -> None:
        """Go on in ``lane`` of the plan's ``microbatch``, in the middle of its backward."""
        self._microbatches.go_to(microbatch, lane)
        self._loss_scale.beside(counts=not self._microbatches.is_idle)

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
        self._tally.begin_forward()
        tensor, tokens, reported = activation, torch.empty(0), list[dict[str, torch.Tensor]]()
        sums_losses = self._config.calculate_per_token_loss
        for block in self._holdings.blocks_of(first, last):
            is_last_stage = block.last == self._holdings.spec.num_layers
            stage = groups.in_stage(*self._holdings.spec.reads_as(first=block.first == 0, last=is_last_stage))
            with cut_off.tidied(self._config, self._holdings.held.values()), stage, needed.asking(needs):
                self._holdings.seeds.reseed_script()
                tensor, tokens = schedules.forward_step(
                    by_context.forward_step_of(
                        self._holdings.cell,
                        scripted.checked(self.forward_step, sums_losses=sums_losses),
                        sums_losses=sums_losses,
                    ),
                    self._microbatches.source,
                    block.model,
                    self._microbatches.count * self._losses_of_one // self._replicas,
                    tensor,
                    reported,
                    self._config,
                    cp_group_size=self._context_size,
                    current_microbatch=microbatch,
                    is_last_stage=is_last_stage,
                )
        assert tensor is not None
        # Blocks before the head have no losses; that is known on the host, without asking the device.
        if not self._microbatches.is_idle:
            self._tally.add(microbatch, first, last, tokens, self._tally.read(reported), ahead=ahead)
        return tensor

    def adopt(self, visits: Collection[Visit]) -> None:
        ours = {(one, first) for place, first, _ in visits for one in self._microbatches.in_all_lanes(place)}
        for place in self._tally.adopt(ours):
            self._flights.pop(place, None)

    def kept(self, microbatch: int, first: int, last: int) -> None:
        if not self._training:
            return
        output = self._flights[self._microbatches.go_to(microbatch), first].output
        schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def undo(self, visits: Collection[Visit]) -> None:
        for microbatch, first, last in visits:
            for number in self._microbatches.in_all_lanes(microbatch):
                self._flights.pop((number, first), None)
                self._tally.undo(number, first, last, with_losses=last == self._holdings.spec.num_layers)

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
            if self._microbatches.in_first_lane:
                passed(layer)
                self._microbatches.go_to(microbatch)  # switch back, since recomputation draws random numbers

        if passed is not None:
            passed(last)
        flight = self._flights[self._microbatches.go_to(microbatch), first]
        collecting = flight.weight_grads.collecting(on_the_way if passed else None)
        with (
            cut_off.tidied(self._config, self._holdings.held.values()),
            collecting,
            self._loss_scale.only_if(word),
        ):
            config = self._config
            found: torch.Tensor | None = compat.backward_step(flight.activation, flight.output, grad, config)
            return found

    def weight_grad(self, microbatch: int, first: int, last: int) -> None:
        self._flights.finish(self._microbatches.go_to(microbatch), first, last, self._holdings.layers)

    def empty_message(self) -> torch.Tensor:
        return torch.empty(
            self._message_shape, dtype=self._config.pipeline_dtype, device=torch.cuda.current_device()
        )
