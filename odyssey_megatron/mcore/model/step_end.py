"""The end of a step on one rank: its share of what all ranks sum, and the optimizer step from the sums (I4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from odyssey_megatron.cluster.expert_loads import expert_loads
from odyssey_megatron.errors import NotFinite
from odyssey_megatron.mcore.loop import outcome
from odyssey_megatron.mcore.loop.microbatches import Microbatches
from odyssey_megatron.mcore.loop.outcome import StepOutcome
from odyssey_megatron.mcore.model.clipping import clipped
from odyssey_megatron.mcore.model.holdings import Holdings
from odyssey_megatron.mcore.model.layers import HeldLayer
from odyssey_megatron.mcore.model.logits import LargestLogit
from odyssey_megatron.mcore.model.loss_scale import LossScale
from odyssey_megatron.mcore.model.optimizer import LearningRate
from odyssey_megatron.mcore.model.sums import Sums
from odyssey_megatron.mcore.model.tally import Tally
from odyssey_megatron.mcore.pinned import to_device
from odyssey_megatron.names import first_few, step_name
from odyssey_megatron.plan.placing.slices import Span, firsts
from odyssey_megatron.plan.schedule import Instr


class StepEnd:
    """Turns what this rank has computed into its share of the step's totals, and everyone's totals into new weights.
    Implements ``execute.parts.StepEnd``.
    """

    def __init__(
        self,
        holdings: Holdings,
        sums: Sums,
        microbatches: Microbatches,
        loss_scale: LossScale,
        tally: Tally,
        *,
        learning_rate: LearningRate | None,
        spare_on_host: bool,
        world_size: int,
    ):
        """``spare_on_host``: optimizer state that is kept only for a failure lies in host memory between steps.

        ``world_size``: the largest number of ranks that the job may have.
        """
        self._holdings, self._sums = holdings, sums
        self._microbatches, self._tally = microbatches, tally
        self._routing, self._spare_on_host = holdings.routing, spare_on_host
        self._logits = LargestLogit(holdings.spec.config, holdings.cell.rank, world_size)
        self._loss_scale, self.learning_rate = loss_scale, learning_rate
        self._spec = holdings.spec
        self._is_first_of_tensor = holdings.groups.tp.rank() == 0
        self._speaks = self._is_first_of_tensor and holdings.groups.cp.rank() == 0
        """Whether this rank speaks for those that compute a microbatch with it."""
        self._suspected = ""

    def begin(self) -> None:
        """Begin a step, whose microbatches have begun."""
        # Now, since whoever computes heads has to wait for its first activation anyway.
        self._look_ahead()
        self._logits.begin(self._holdings.layers)

    def _look_ahead(self) -> dict[int, int]:
        """Look at the next step's microbatches whose heads would run here; maps each to the first of its route."""
        if not self._speaks:
            return {}
        return self._microbatches.look_ahead(self._holdings.layout, self._holdings.worker)

    @property
    def num_totals(self) -> int:
        return sum(self._sizes_of_totals)

    @property
    def _sizes_of_totals(self) -> list[int]:
        """Sizes of the step's own totals, of routers', of logits', and of what is known of the next step."""
        own = [part.num_totals for part in (self._routing, self._logits, self._microbatches.balance)]
        return [outcome.num_totals(self._tally.names), *own]

    def take_over(self, totals: torch.Tensor, step: int, scale: torch.Tensor) -> None:
        """On a rank that joins, take over what all ranks have alike besides layers: the totals of the step before
        ``step``, 1-D, and the state of the loss scale, 1-D.
        """
        self._microbatches.balance.take(torch.split(totals, self._sizes_of_totals)[-1], step)
        self._loss_scale.take_over(scale)

    def local_totals(self) -> torch.Tensor:
        """This rank's share of the step's totals, 1-D, float64.

        Only the first holder of a block counts its gradient (the first owner of a slice, where state is cut), and only
        the ranks that ran a microbatch's head count the microbatch.
        """
        cell, layers, source = self._holdings.cell, self._holdings.layers, self._microbatches.source
        totals = outcome.local_totals(
            self._counted_gradients(),
            self._tally.losses,
            self._tally.names,
            tokens=self._tally.tokens.values(),
            sequences=source.sequences if source is not None else {},
            cell=cell,
            with_zeros=self._spec.optimizer_config.log_num_zeros_in_grad,
        )
        ahead = self._microbatches.balance.local_totals(self._look_ahead(), speaks=cell.lane == 0)
        logits = self._logits.local_totals(layers)
        return torch.cat([totals, self._routing.local_totals(), logits, to_device(ahead)])

    def _counted_gradients(self) -> list[tuple[torch.Tensor, int]]:
        """See ``outcome.counted_gradients``."""
        holdings, layout, worker = self._holdings, self._holdings.layout, self._holdings.worker
        if layout.keepers:
            return [
                one
                for layer, spans in self._first_spans()
                for one in outcome.counted_numbers(layer, spans, holdings.cell)
            ]
        own = [block for block in layout.blocks() if block.holders[0] == worker]
        blocks = [holdings.blocks[block.first, block.last] for block in own]
        return [one for block in blocks for one in outcome.counted_gradients(block, holdings.cell)]

    def _first_spans(self) -> Iterator[tuple[HeldLayer, tuple[Span, ...]]]:
        """Yield each layer with the spans of which this rank is the first keeper."""
        holdings = self._holdings
        own, states = holdings.stretches, holdings.layout.states
        for layer in holdings.layers:
            yield layer, own.spans(firsts(states[layer.index]).get(holdings.worker, ()))

    def timed(self, took_s: Callable[[], Mapping[Instr, float]]) -> None:
        """Report the times ``took_s`` that this rank's instructions took in a step that is over."""
        self._microbatches.balance.timed(took_s)

    def expert_loads(self) -> dict[int, float]:
        """See ``cluster.expert_loads.expert_loads``, for the last step. Empty if no experts are spread over ranks."""
        whole = self._holdings.cell.whole
        return expert_loads(whole, self._routing.tokens.tolist()) if whole.expert > 1 else {}

    def squared_weights(self) -> torch.Tensor:
        """This rank's share of the sum of all squared parameters, [1], float64. A slice's first owner counts it."""
        cut = bool(self._holdings.layout.keepers)
        return outcome.squared_weights(self._first_spans(), self._holdings.cell, cut=cut)

    def local_losses(self) -> torch.Tensor:
        """The losses of this rank's share of the evaluated microbatches; summed over ranks they are a table of all,
        with the shape of ``outcome.loss_table``.
        """
        losses = self._tally.losses if self._is_first_of_tensor else {}
        names, count = self._tally.loss_names, self._microbatches.count
        return outcome.loss_table(losses, names, count, self._holdings.cell)

    def suspect(self, microbatches: Iterable[int]) -> None:
        """Name in :meth:`apply`'s error those of a plan's ``microbatches``, if not all, where not all is finite."""
        few, more = first_few(found := self._microbatches.numbers(microbatches))
        is_some = 0 < len(found) < self._microbatches.count
        self._suspected = (
            f", as numbers of microbatch(es) {few}{more} of the step are not finite" if is_some else ""
        )

    def apply(self, totals: torch.Tensor, checkpoint: Callable[[], None]) -> StepOutcome:
        """Make the optimizer step from reduced gradients and everyone's ``totals``, 1-D; sends nothing.

        Raises:
            NotFinite: the same on every rank, before any weight has changed.
        """
        totals, routed, logits, ahead = torch.split(totals, self._sizes_of_totals)
        self._sums.forget()  # all agree on the step, so that nobody asks for a worker's own gradients any more
        holdings, microbatches = self._holdings, self._microbatches
        batches, balance, step = microbatches.batches, microbatches.balance, microbatches.step
        seen = balance.seen
        balance.take(ahead, step + 1)
        squared_norm, zeros, tokens, num_microbatches, lengths, squares, *losses = totals.tolist()
        if step in batches.left_out:
            holdings.let_go()
            return self._leave_out()
        config = self._spec.optimizer_config
        gradient = clipped(
            squared_norm,
            loss_scale=self._loss_scale.value.item() if self._loss_scale else 1.0,
            tokens=tokens if self._spec.config.calculate_per_token_loss else 1.0,
            clip_grad=config.clip_grad,
        )
        skipped = not gradient.is_finite
        if skipped and not self._loss_scale.skips:
            raise NotFinite(
                f"{step_name(step)}: the gradient norm is {gradient.norm}{self._suspected}. No weight was changed. "
                "Lower --lr, or look at the samples of this step in the journal."
            )
        holdings.let_go()
        assert self.learning_rate is not None
        kept = {at: layer.optimizer for at, layer in holdings.held.items() if layer.optimizer is not None}
        lr = self.learning_rate.set(list(kept.values()), step, batches, self._loss_scale)
        spare = holdings.layout.spare_states(holdings.worker) if self._spare_on_host else {}
        own = holdings.stretches
        for index, optimizer in kept.items():
            if not skipped:
                optimizer.apply(gradient.scale)
            optimizer.park(own.spans(spare.get(index, ())))
            checkpoint()
        self._routing.balance(holdings.held, routed)  # after a skipped step, too
        self._loss_scale.update(skipped=skipped, samples=batches.size(step))
        return StepOutcome(
            losses=outcome.means(losses, self._tally.names),
            grad_norm=None if skipped else gradient.norm,
            lr=lr,
            skipped=skipped,
            num_zeros_in_grad=int(zeros) if config.log_num_zeros_in_grad and not skipped else None,
            tokens=int(tokens),
            num_microbatches=int(num_microbatches),
            sequences=(lengths, squares) if lengths else (None, None),
            aux_losses=self._routing.losses(routed),
            max_attention_logit=self._logits.largest(logits),
            dealt=seen,
        )

    def _leave_out(self) -> StepOutcome:
        """End a step that trains on nothing, and does not count in the learning rate's schedule."""
        assert self.learning_rate
        batches, step = self._microbatches.batches, self._microbatches.step
        lr = self.learning_rate.set([], step, batches, self._loss_scale)
        self._loss_scale.leave_out(batches.size(step))
        return StepOutcome(lr=lr, skipped=True)

    def samples_of_losses(self) -> dict[int, list[int]]:
        """Microbatch -> its samples, for those whose loss this rank computed in this step as the first of its lane."""
        source = self._microbatches.source
        assert source is not None
        fetched, ours = source.fetched, sorted(self._tally.losses) if self._speaks else ()
        return {microbatch: fetched[microbatch] for microbatch in ours if microbatch in fetched}
