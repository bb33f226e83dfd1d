"""The Megatron model of one rank, put together of what a recovery moves and what a step computes with it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.mcore.loop.data import MicrobatchSource
from odyssey_megatron.mcore.loop.microbatches import Microbatches
from odyssey_megatron.mcore.model import groups, span, te
from odyssey_megatron.mcore.model.future import FutureTokens
from odyssey_megatron.mcore.model.holdings import Holdings
from odyssey_megatron.mcore.model.layers import ModelSpec
from odyssey_megatron.mcore.model.loss_scale import LossScale
from odyssey_megatron.mcore.model.optimizer import LearningRate
from odyssey_megatron.mcore.model.passes import ForwardStep, Passes
from odyssey_megatron.mcore.model.state_transfer import StateTransfer
from odyssey_megatron.mcore.model.step_end import StepEnd
from odyssey_megatron.mcore.model.sums import Sums
from odyssey_megatron.mcore.model.tally import Tally
from odyssey_megatron.plan.layout import Layout

_ALONE = Cell(rank=0)


class MegatronModel:
    """One rank's share of the model: its parts, and what begins or ends for all of them at once. Implements
    ``execute.parts.Model``.
    """

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

        ``cuts_activations``: whether a whole cell's ranks have pieces of activations; None: as this cell's config says.

        ``spare_on_host``: optimizer state that is kept only for a failure lies in host memory between steps.

        ``replicas``: the launch line's data parallelism. With a loss scale, gradients are as large as Megatron's there.
        """
        te.prepare(spec.config)
        span.install()
        self.spec, self.loss_names, config = spec, tuple(loss_names), spec.config
        self.cuts_activations = config.sequence_parallel if cuts_activations is None else cuts_activations
        self.loss_scale = LossScale(spec.optimizer_config, ends_job=spec.overflow_ends_job)
        self.future = FutureTokens(config)
        own = groups_of_cell or groups.initialize(data_parallel=spec.looks_ahead)
        self.holdings = holdings = Holdings(spec, cell, own)
        self.microbatches = Microbatches(
            cell,
            holdings.seeds,
            num_microbatches=num_microbatches,
            micro_batch_size=micro_batch_size,
            source=source,
        )
        replicas = replicas if self.loss_scale and not config.calculate_per_token_loss else 1
        of_both = self.microbatches, self.loss_scale, Tally(self.loss_names, self.future, holdings.routing)
        self.compute = Passes(
            holdings,
            *of_both,
            forward_step=forward_step,
            replicas=replicas,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
        )
        self.transfer, self.sums = StateTransfer(holdings), Sums(holdings, share=1.0 / replicas)
        self.end = StepEnd(
            holdings,
            self.sums,
            *of_both,
            learning_rate=learning_rate,
            spare_on_host=spare_on_host,
            world_size=world_size,
        )

    def forget(self) -> None:
        """Hold nothing from now on: what this rank was sent in a generation that failed is out of date."""
        self.transfer.discard_incoming()
        self.holdings.forget()
        self.compute.drop_flights()

    def take_layout(self, layout: Layout, worker: int) -> None:
        """Hold the layers of ``worker`` under ``layout``, and assemble the blocks to compute with.

        Raises:
            TransferIncomplete: a layer is neither held nor received.
        """
        self.transfer.bring_in(layout, worker)
        self.holdings.take_layout(layout, worker, replacing=self.compute.flush_bound)
        self.sums.forget()

    def begin_step(self, step: int) -> None:
        """Forget whatever an earlier attempt left, and zero the gradients."""
        self.microbatches.begin(step)
        self.compute.begin(training=True)
        self.end.begin()
        self.sums.forget()
        self.holdings.zero_gradients()

    def begin_evaluation(self, first: int, microbatches: int) -> None:
        """Begin an evaluation of ``microbatches`` of the source from ``first`` on; nothing is kept for a backward."""
        self.microbatches.begin_evaluation(first, microbatches)
        self.compute.begin(training=False)

    def microbatches_of(self, step: int) -> int:
        """The number of microbatches of ``step`` as a plan counts them: one for all lanes of a cell."""
        return self.microbatches.of_plan(step)
