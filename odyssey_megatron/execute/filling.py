"""The state of layers on its way to where a generation's plan wants it, and of weights behind every step."""

from __future__ import annotations

import time
from collections.abc import Callable

from odyssey_megatron.execute.channels import Channels
from odyssey_megatron.execute.parts import Model
from odyssey_megatron.execute.regrouping import Regrouping
from odyssey_megatron.plan.assignment import Assignment
from odyssey_megatron.rebuild.transfer import Moving, Spreading


class Filling:
    """Of one rank in one generation: what it lacks of its layers, and what others lack of those that it has.

    Collective over all members, as its parts are.

    Args:
        checkpoint: is called between layers, and raises Superseded when the generation has ended.
        live: is called when all is here.
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
    ):
        self._assignment, self._model, self._groups, self._live = assignment, model, groups, live
        model.expect(assignment.kept)
        self._moving: Moving | None = Moving(
            assignment.plan.transfers,
            num_layers=assignment.layout.num_layers,
            cell=assignment.cell,
            world=groups.world,
            ways=channels.of_transfer,
            tensors_to_send=model.tensors_to_send,
            tensors_to_fill=model.tensors_to_fill,
            filled=model.filled,
            checkpoint=checkpoint,
        )
        self._spreading: Spreading | None = None

    @property
    def may_wait(self) -> bool:
        """The first step can compute while layers arrive: it was not begun for a failure's sake, and does not need
        them.
        """
        arriving = self._moving.arriving if self._moving is not None else set()
        return self._assignment.generation.planned and arriving.isdisjoint(self._assignment.needed_at_once)

    def finish(self) -> float | None:
        """All state of the plan is here when it returns, and all weights. Before anything that changes weights, or
        needs those sent.

        Returns:
            The seconds that this rank has waited for it; None if it was here already.
        """
        if self._spreading is not None:  # first, as what moves may be newer than what was there to be spread
            self._spreading.finish()
        if self._moving is None:
            return None
        began_s = time.monotonic()
        self._moving.finish()
        self._groups.entered.settle()
        self._model.settled()
        self._moving = None
        self._live()
        return time.monotonic() - began_s

    def prepare_spreading(self) -> Spreading:
        """From here on the weights of layers whose optimizer state not all holders keep can be spread."""
        self._spreading = Spreading(
            self._assignment.layout,
            self._assignment.buckets,
            cell=self._assignment.cell,
            world=self._groups.world,
            holders_of=lambda *block: self._groups.holders_of(self._assignment, *block),
            weights_of=self._model.weights_of,
            arrived=self._model.weights_arrived,
        )
        return self._spreading

    @property
    def spreads(self) -> bool:
        """This rank has a part in that."""
        return self._spreading is not None and self._spreading.has_part

    def spread(self) -> None:
        """From the first keeper of each slice to the holders that do not keep its optimizer state, beside what comes
        next.

        Whoever is cut off here by a failure is committed all the same: the keepers have what it lacks, and the next
        generation begins with this.
        """
        if self._spreading is not None:
            self._spreading.begin()
