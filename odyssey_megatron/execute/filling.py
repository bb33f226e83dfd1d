"""The transfer of layers to where a generation's plan wants them, and of weights after every step."""

from __future__ import annotations

import time
from collections.abc import Callable

from odyssey_megatron.execute.channels import Channels
from odyssey_megatron.execute.parts import Model
from odyssey_megatron.execute.regrouping import Regrouping
from odyssey_megatron.plan.sending.assignment import Assignment
from odyssey_megatron.rebuild.transfer import Moving, Spreading


class Filling:
    """The transfers of one rank in one generation: of state that it lacks, or that others lack and it has.

    Collective over all members, as its parts are.

    Args:
        checkpoint: Called between layers; raises Superseded when the generation has ended.
        live: Called when all state is here.
        filled: Called behind it with the seconds that this rank has waited for it.
    """

    def __init__(
        self,
        assignment: Assignment,
        model: Model,
        groups: Regrouping,
        channels: Channels,
        *,
        checkpoint: Callable[[], None],
        live: Callable[[], None],
        filled: Callable[[float], None],
    ):
        self._assignment, self._model, self._groups = assignment, model, groups
        self._live, self._filled = live, filled
        model.transfer.expect(assignment.kept)
        self._moving: Moving | None = Moving(
            assignment.plan.transfers,
            num_layers=assignment.layout.num_layers,
            cell=assignment.cell,
            world=groups.world,
            ways=channels.of_transfer,
            tensors_to_send=model.transfer.tensors_to_send,
            tensors_to_fill=model.transfer.tensors_to_fill,
            filled=model.transfer.filled,
            checkpoint=checkpoint,
        )
        self._spreading: Spreading | None = None

    @property
    def may_wait(self) -> bool:
        """Whether the first step can compute while layers arrive.

        It can if no failure began the generation, and if the step does not need these layers at once.
        """
        arriving = self._moving.arriving if self._moving is not None else set()
        return self._assignment.generation.planned and arriving.isdisjoint(self._assignment.needed_at_once)

    def finish(self) -> None:
        """Wait until all state of the plan is here, and all weights of the last step.

        Called before anything that changes weights, or that needs weights which other ranks send: what the
        device is given from now on sees them.
        """
        # Spread weights come first, as layers that move may be newer than what was there to be spread.
        if self._spreading is not None:
            self._spreading.finish()
        if self._moving is None:
            return
        began_s = time.monotonic()
        self._moving.finish()
        self._groups.entered.settle()
        self._model.transfer.settled()
        self._moving = None
        self._live()
        self._filled(time.monotonic() - began_s)

    def prepare_spreading(self) -> Spreading:
        """Prepare to spread the weights of layers whose optimizer state not all holders keep."""
        self._spreading = Spreading(
            self._assignment.layout,
            self._assignment.buckets,
            cell=self._assignment.cell,
            world=self._groups.world,
            holders_of=lambda *block: self._groups.holders_of(self._assignment, *block),
            weights_of=self._model.transfer.weights_of,
            arrived=self._model.transfer.weights_arrived,
        )
        return self._spreading

    @property
    def spreads(self) -> bool:
        """Whether this rank has a part in the spreading of weights."""
        return self._spreading is not None and self._spreading.has_part

    def spread(self) -> None:
        """Start sending the weights of each slice from its first keeper to holders that lack its optimizer state.

        This runs beside what comes next. A rank that a failure cuts off here has committed the step all the
        same: the keepers have what it lacks, and the next generation begins by spreading once more.
        """
        if self._spreading is not None:
            self._spreading.begin()
