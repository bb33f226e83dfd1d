"""Holds ``mcore/loop/orders.py`` against the checkout's own samplers: every replica, several epochs, any start."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any


def dealt(samplers: Sequence[Any]) -> Iterator[list[int]]:
    """The microbatches of all replicas in turn, over and over again, as ``cyclic_iter`` has it."""
    streams = [itertools.chain.from_iterable(itertools.repeat(one)) for one in samplers]
    while True:
        for stream in streams:
            yield next(stream)


def assert_equal(order: Any, samplers: Sequence[Any], *, size: int, consumed: int, count: int) -> None:
    expected = list(itertools.islice(dealt(samplers), count))
    places = [range(at, at + size) for at in range(consumed, consumed + size * count, size)]
    assert [list(order(one)) for one in places] == expected, (vars(order), consumed)


def main() -> None:
    from megatron.training.datasets import data_samplers

    from odyssey_megatron.mcore.loop.orders import Repeated, Shuffled, WholeSet

    for size, replicas, is_sharded in itertools.product((1, 2, 3), (1, 2, 4), (False, True)):
        for num_samples in (24, 25, 31) if is_sharded else (24, 48):
            order = Shuffled(num_samples, micro_batch_size=size, replicas=replicas, is_sharded=is_sharded)
            for turns in (0, 1, len(order), 2 * len(order) + 1):
                consumed = turns * size * replicas
                samplers = [
                    data_samplers.MegatronPretrainingRandomSampler(
                        None, num_samples, consumed, size, rank, replicas, is_sharded
                    )
                    for rank in range(replicas)
                ]
                count = 3 * len(order) * replicas
                assert_equal(order, samplers, size=size, consumed=consumed, count=count)
        read = Repeated(31, micro_batch_size=size, replicas=replicas)
        samplers = [
            data_samplers.MegatronPretrainingSampler(31, 0, size, rank, replicas) for rank in range(replicas)
        ]
        assert len(read) == len(samplers[0])
        assert_equal(read, samplers, size=size, consumed=0, count=80)
    whole = getattr(data_samplers, "MegatronFullValidationSampler", None)
    for replicas in (1, 2, 4) if whole is not None else ():
        samplers = [whole(31, rank, replicas) for rank in range(replicas)]
        order = WholeSet(31, micro_batch_size=1, replicas=replicas)
        assert len(order) == max(map(len, samplers))
        assert_equal(order, samplers, size=1, consumed=0, count=80)


if __name__ == "__main__":
    main()
