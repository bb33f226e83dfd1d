"""Data by global sample index (I1): microbatch m of step i is the same samples wherever it runs, and whenever."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from odyssey_megatron.mcore.loop.batches import Batches


def global_samples(*, before: int, microbatch: int, micro_batch_size: int) -> range:
    """Indices, in consumption order, of the samples of one microbatch of the step behind ``before`` samples."""
    first = before + microbatch * micro_batch_size
    return range(first, first + micro_batch_size)


class MicrobatchSource:
    """The data iterator that the user's ``forward_step`` is given: it yields the microbatch that the plan names."""

    def __init__(
        self,
        dataset: Sequence[Any],
        *,
        global_batch_size: int,
        micro_batch_size: int,
        collate: Callable[[list[Any]], Any] = default_collate,
        offset: int = 0,
    ):
        """``offset`` is the sample that the first step begins with."""
        self._dataset, self._collate, self._offset = dataset, collate, offset
        self._micro_batch_size = micro_batch_size
        self._at, self._batch = (-1, -1), None
        self.batches = Batches.constant(global_batch_size)
        self.evaluated = 0
        """Batches that evaluations have taken."""
        self.fetched: dict[int, list[int]] = {}
        """Microbatch -> samples that were read for it since :meth:`begin_step`."""

    def begin_step(self) -> None:
        self._at, self._batch = (-1, -1), None
        self.fetched = {}

    def go_to(self, *, step: int, microbatch: int) -> None:
        """From now on ``next()`` gives this microbatch."""
        if (step, microbatch) != self._at:
            self._at, self._batch = (step, microbatch), None

    def __iter__(self) -> MicrobatchSource:
        return self

    def __next__(self) -> Any:
        if self._batch is None:
            step, microbatch = self._at
            samples = global_samples(
                before=self.batches.before(step),
                microbatch=microbatch,
                micro_batch_size=self._micro_batch_size,
            )
            self._batch = self._collate([self._dataset[self._offset + sample] for sample in samples])
            self.fetched[microbatch] = [self._offset + sample for sample in samples]
        # From 0.18 on the first stage's forward step takes the labels out of what it is given.
        return copy.copy(self._batch)
