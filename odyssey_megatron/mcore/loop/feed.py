"""What a pass of microbatches computes, and with which data: Megatron's loaders as sources that the plan can ask."""

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
    """Of one rank's Megatron-LM run."""

    def __init__(self, stage: OwnStage):
        self._stage = stage
        self.replicas = 1
        """Of the launch line."""

    def build_pretraining_data_loader(
        self, original: Any, dataset: Any, consumed_samples: int
    ) -> MicrobatchSource | None:
        """None: there is no such data, and Megatron leaves out what would read it."""
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
        """What :meth:`build_pretraining_data_loader` gave; a rank that reads no data gets one that cannot be read."""
        if data_iterator is None:
            return MicrobatchSource((), micro_batch_size=1)
        found: MicrobatchSource = getattr(data_iterator, "iterable", data_iterator)
        return found

    def __call__(self, model: MegatronModel, forward_step_func: Any, data_iterator: Any) -> None:
        """``model`` goes on with these."""
        model.forward_step = self._stage.forward_step(forward_step_func, model)
        model.source = self.source(data_iterator)

    def join(self, valid_data_iterator: Any, evaluated: Sequence[int]) -> None:
        """So many microbatches of each validation set have been ``evaluated`` without this rank."""
        sets = valid_data_iterator if isinstance(valid_data_iterator, list) else [valid_data_iterator]
        for one, microbatches in zip(sets, evaluated, strict=True):
            self.source(one).evaluated = microbatches


@contextlib.contextmanager
def whole_indices() -> Iterator[None]:
    """In the body NumPy's files are there as a whole, or not at all. Megatron writes an index where it is to be, and
    whoever comes next takes one that is there for one that is whole.
    """
    save = numpy.save

    def saved(file: Any, *args: Any, **kwargs: Any) -> None:
        if not str(file).endswith(".npy"):  # a file that is open, or one that NumPy will add that to
            save(file, *args, **kwargs)
            return
        unfinished = f"{file}.{secrets.token_hex(8)}.unfinished.npy"  # another job may build the same one
        save(unfinished, *args, **kwargs)
        os.replace(unfinished, file)

    numpy.save = saved
    try:
        yield
    finally:
        numpy.save = save
