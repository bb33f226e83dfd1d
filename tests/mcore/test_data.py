"""I1: data by global sample index."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")


def test_a_step_is_its_samples_each_once_in_order():
    from odyssey_megatron.mcore.loop.data import global_samples

    seen = [
        sample
        for step in range(3)
        for microbatch in range(4)
        for sample in global_samples(
            step=step, microbatch=microbatch, global_batch_size=8, micro_batch_size=2
        )
    ]
    assert seen == list(range(24))


def test_the_iterator_yields_the_microbatch_that_is_named():
    from odyssey_megatron.mcore.loop.data import MicrobatchSource

    source = MicrobatchSource(range(100), global_batch_size=8, micro_batch_size=2)
    source.begin_step()
    source.go_to(step=1, microbatch=3)
    assert next(source).tolist() == [14, 15]
    assert next(source).tolist() == [14, 15], "another block of the same hop asks again"
    source.go_to(step=1, microbatch=0)
    assert next(source).tolist() == [8, 9]
    assert source.fetched == {3: [14, 15], 0: [8, 9]}
    source.begin_step()
    assert source.fetched == {}
