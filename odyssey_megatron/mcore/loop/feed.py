"""Connects a pass of microbatches to its data: Megatron's data loaders become sources that the plan can ask."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from odyssey_megatron.mcore.loop.data import DrawnBySample, MicrobatchSource
from odyssey_megatron.mcore.loop.orders import order_of
from odyssey_megatron.mcore.model.model import MegatronModel
from odyssey_megatron.mcore.model.stage import OwnStage
from odyssey_megatron.upstream import compat


class Feed:
    """The data sources and forward step of one rank's Megatron-LM run."""

    def __init__(self, stage: OwnStage):
        self._stage = stage
        self.replicas = 1
        """The launch line's number of data-parallel replicas."""

    def build_pretraining_data_loader(
        self, original: Any, dataset: Any, consumed_samples: int
    ) -> MicrobatchSource | None:
        """The source for ``dataset``; None if there is no such data, and Megatron leaves out what would read it."""
        from megatron.training import get_args

        if dataset is None:
            return None
        args = get_args()
        samples = dataset
        if args.fim_data and (drawn := compat.generators_of(dataset)):
            samples = DrawnBySample(dataset, drawn, args.seed)
        return MicrobatchSource(
            samples,
            micro_batch_size=args.micro_batch_size,
            offset=consumed_samples,
            order=order_of(args, dataset, self.replicas),
        )

    def source(self, data_iterator: Any) -> MicrobatchSource:
        """The source from :meth:`build_pretraining_data_loader`; an empty one on a rank that reads no data."""
        if data_iterator is None:
            return MicrobatchSource((), micro_batch_size=1)
        found: MicrobatchSource = getattr(data_iterator, "iterable", data_iterator)
        return found

    def __call__(self, model: MegatronModel, forward_step_func: Any, data_iterator: Any) -> None:
        """Make ``model`` use this forward step and data."""
        model.compute.forward_step = self._stage.forward_step(forward_step_func, model)
        model.microbatches.source = self.source(data_iterator)

    def join(self, valid_data_iterator: Any, evaluated: Sequence[int]) -> None:
        """Skip the microbatches of each validation set that were ``evaluated`` before this rank joined."""
        sets = valid_data_iterator if isinstance(valid_data_iterator, list) else [valid_data_iterator]
        for one, microbatches in zip(sets, evaluated, strict=True):
            self.source(one).evaluated = microbatches


@contextlib.contextmanager
def whole_indices() -> Iterator[None]:
    """In the body NumPy writes complete files or none. Megatron writes an index directly to its final path, and the
    next process takes an existing file for a complete one.
    """
    save = numpy.save

    def saved(file: Any, *args: Any, **kwargs: Any) -> None:
        if not str(file).endswith(".npy"):  # an open file, or a name to which NumPy will add the suffix
            save(file, *args, **kwargs)
            return
        unfinished = f"{file}.{secrets.token_hex(8)}.unfinished.npy"  # other jobs may build the same one
        save(unfinished, *args, **kwargs)
        os.replace(unfinished, file)

    numpy.save = saved
    try:
        yield
    finally:
        numpy.save = save
