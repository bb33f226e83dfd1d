"""Data by global sample index (I1): microbatch m of step i has the same samples wherever and whenever it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from odyssey_megatron.mcore.model.rng import derive_seed
from odyssey_megatron.mcore.pinned import pinned


def global_samples(*, before: int, microbatch: int, micro_batch_size: int) -> range:
    """The indices, in consumption order, of the samples of one microbatch of the step that comes after ``before``
    samples.
    """
    first = before + microbatch * micro_batch_size
    return range(first, first + micro_batch_size)


class SampleOrder(Protocol):
    """The order in which the samples of a data set are consumed (``mcore/loop/orders.py``)."""

    def __call__(self, places: range) -> Sequence[int]:
        """The samples at ``places`` in the order of consumption; the places are those of one microbatch."""
        ...

    def __len__(self) -> int:
        """The number of microbatches that a replica takes from the data set."""
        ...


class DrawnBySample:
    """A data set that draws random numbers to make a sample, seeded by (seed, sample); otherwise they would depend on
    what was read before, and so on who reads.
    """

    def __init__(self, dataset: Sequence[Any], generators: Sequence[Any], seed: int):
        """``generators``: those that ``dataset`` draws from, each a NumPy RandomState."""
        self._dataset, self._generators, self._seed = dataset, generators, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, sample: int) -> Any:
        for one in self._generators:
            one.seed(derive_seed(self._seed, sample) % 2**32)
        return self._dataset[sample]


def _lengths(packed: Any) -> torch.Tensor:
    """Lengths of the sequences of one packed sample, or of several: 1-D or 2-D, float64; padding has length 0."""
    lengths: torch.Tensor = packed["cu_seqlens"].diff().double()
    return lengths


class MicrobatchSource:
    """The data iterator for the user's ``forward_step``: it yields the microbatch that the plan names, in pinned
    memory, as Megatron's loaders do.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        *,
        micro_batch_size: int,
        order: SampleOrder | None = None,
        offset: int = 0,
        squared_lengths: Callable[[int], float] | None = None,
    ):
        """
        Args:
            order: None: ``dataset`` is read from its first sample to its last.
            offset: the place of the first sample of the first step.
            squared_lengths: as in ``TrainingJob``; None: taken from a sample's ``cu_seqlens``.
        """
        self._dataset, self._order, self.offset = dataset, order, offset
        self._micro_batch_size, self._squared_lengths = micro_batch_size, squared_lengths
        self._before, self._microbatch, self._batch = 0, -1, None
        self.evaluated = 0
        """Number of microbatches that evaluations have taken."""
        self.fetched: dict[int, list[int]] = {}
        """Microbatch -> the places of the samples that were read for it since :meth:`begin`."""
        self.sequences: dict[int, tuple[float, float]] = {}
        """Microbatch that was read -> the sum of the lengths of its packed sequences, and the sum of their squares."""

    def __len__(self) -> int:
        """The number of microbatches of a replica, for ``--full-validation``."""
        assert self._order is not None
        return len(self._order)

    def begin(self, before: int) -> None:
        """Begin a step: from now on microbatches are counted from the sample after ``before``."""
        self._before, self._microbatch, self._batch = before, -1, None
        self.fetched, self.sequences = {}, {}

    def go_to(self, microbatch: int) -> None:
        """Make ``next()`` return this microbatch."""
        if microbatch != self._microbatch:
            self._microbatch, self._batch = microbatch, None

    def squares(self, before: int, microbatch: int) -> float:
        """The sum of squared lengths of the packed sequences of a microbatch in the step after ``before`` samples."""
        of_sample = self._squared_lengths or self._read_squared_lengths
        return sum(of_sample(one) for one in self._samples(self._places(before, microbatch)))

    def _read_squared_lengths(self, sample: int) -> float:
        return _lengths(self._dataset[sample]).square().sum().item()

    def _places(self, before: int, microbatch: int) -> range:
        first = self.offset + before
        return global_samples(before=first, microbatch=microbatch, micro_batch_size=self._micro_batch_size)

    def _samples(self, places: range) -> Sequence[int]:
        return places if self._order is None else self._order(places)

    def __iter__(self) -> MicrobatchSource:
        return self

    def __next__(self) -> Any:
        if self._batch is None:
            places = self._places(self._before, self._microbatch)
            self._batch = pinned(default_collate([self._dataset[sample] for sample in self._samples(places)]))
            self.fetched[self._microbatch] = list(places)
            if isinstance(self._batch, dict) and "cu_seqlens" in self._batch:
                lengths = _lengths(self._batch)
                self.sequences[self._microbatch] = lengths.sum().item(), lengths.square().sum().item()
        # A copy, as from 0.18 on the first stage's forward step removes the labels from what it is given.
        return copy.copy(self._batch)
