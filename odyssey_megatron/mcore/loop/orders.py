"""The order in which samples of a data set are consumed, as Megatron-LM's samplers deal them to a job's replicas.

A global batch has the same samples as in Megatron-LM. Within it samples are numbered as the replicas take them: a
microbatch each, in turn.
Source: megatron core_v0.16.1 training/datasets/data_samplers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.datasets.utils import Split

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.upstream import compat


class Shuffled:
    """``--dataloader-type cyclic``: the set is repeated, in another order each time. Samples that remain when all
    replicas have had the same number of microbatches are dropped.
    """

    def __init__(self, num_samples: int, *, micro_batch_size: int, replicas: int, is_sharded: bool):
        """``is_sharded``: each replica has a part of the data of its own; else replicas take turns over all of it.

        Raises ConfigError: there is not one microbatch for each replica.
        """
        self._size, self._replicas, self._is_sharded = micro_batch_size, replicas, is_sharded
        self._rounds = _rounds(num_samples, micro_batch_size, replicas)
        self._whole = num_samples // micro_batch_size * micro_batch_size
        self._epoch, self._drawn = -1, list[int]()

    def __len__(self) -> int:
        """The number of microbatches of each replica until it begins again."""
        return self._rounds

    def __call__(self, places: range) -> Sequence[int]:
        turn, replica = divmod(places[0] // self._size, self._replicas)
        epoch, turn = divmod(turn, self._rounds)
        self._draw(epoch)
        mine = range(turn * self._size, (turn + 1) * self._size)
        if self._is_sharded:
            first = replica * self._rounds * self._size
            return [first + self._drawn[one] for one in mine]
        return [self._drawn[one * self._replicas + replica] for one in mine]

    def _draw(self, epoch: int) -> None:
        if epoch != self._epoch:
            drawn = self._rounds * self._size if self._is_sharded else self._whole
            generator = torch.Generator().manual_seed(epoch)
            self._epoch, self._drawn = epoch, torch.randperm(drawn, generator=generator).tolist()


class Repeated:
    """``--full-validation`` before 0.18: the set is read in order, over and over again, for as many microbatches as it
    has samples.
    """

    def __init__(self, num_samples: int, *, micro_batch_size: int, replicas: int):
        self._num_samples = num_samples
        self._read = _rounds(num_samples, micro_batch_size, replicas) * micro_batch_size * replicas

    def __len__(self) -> int:
        """The number of microbatches that Megatron asks each replica for."""
        return self._num_samples

    def __call__(self, places: range) -> Sequence[int]:
        return [one % self._read for one in places]


class WholeSet:
    """``--full-validation`` from 0.18 on: the whole set, in microbatches of one sample, dealt to the replicas in turn;
    each replica repeats its own.
    """

    def __init__(self, num_samples: int, *, micro_batch_size: int, replicas: int):
        """Raises ConfigError: a replica would have no sample, or messages are sized for more than one sample."""
        _rounds(num_samples, 1, replicas)
        if micro_batch_size != 1:
            raise ConfigError(
                f"--full-validation takes microbatches of one sample, and --micro-batch-size is {micro_batch_size}: "
                "messages between stages have one size. Use --micro-batch-size 1, or --eval-iters."
            )
        self._num_samples, self._replicas = num_samples, replicas

    def __len__(self) -> int:
        """The number of microbatches of the replica that has most of them."""
        return -(-self._num_samples // self._replicas)

    def __call__(self, places: range) -> Sequence[int]:
        turn, replica = divmod(places[0], self._replicas)
        mine = range(replica, self._num_samples, self._replicas)
        return [mine[turn % len(mine)]]


def order_of(args: Any, dataset: Any, replicas: int) -> Any:
    """The order that Megatron's ``args`` ask for; None: from the first sample to the last. Raises ConfigError."""
    sizes = {"micro_batch_size": args.micro_batch_size, "replicas": replicas}
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    if args.full_validation and split == Split.valid:
        kind = WholeSet if compat.validates_by_single_samples() else Repeated
        return kind(len(dataset), **sizes)
    if args.dataloader_type == "cyclic":
        return Shuffled(len(dataset), is_sharded=args.data_sharding, **sizes)
    return None


def _rounds(num_samples: int, micro_batch_size: int, replicas: int) -> int:
    """The number of microbatches that each replica can have. Raises ConfigError if it is 0."""
    if rounds := num_samples // (micro_batch_size * replicas):
        return rounds
    raise ConfigError(
        f"{num_samples} samples are fewer than one microbatch of {micro_batch_size} for each of {replicas} replicas. "
        "Use a larger data set, a smaller --micro-batch-size, or, of a validation set, --eval-iters."
    )
