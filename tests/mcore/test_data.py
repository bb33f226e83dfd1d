"""I1: data by global sample index."""

from __future__ import annotations

import argparse

import pytest

from odyssey_megatron.errors import ConfigError

pytest.importorskip("torch")
pytest.importorskip("megatron.core")


def test_a_step_is_its_samples_each_once_in_order():
    from odyssey_megatron.mcore.loop.data import global_samples

    seen = [
        sample
        for step in range(3)
        for microbatch in range(4)
        for sample in global_samples(before=8 * step, microbatch=microbatch, micro_batch_size=2)
    ]
    assert seen == list(range(24))


def test_batches_that_grow_are_megatron_s(megatron):
    from megatron.core import num_microbatches_calculator as calculator

    from odyssey_megatron.mcore.loop.batches import Batches

    calculator.init_num_microbatches_calculator(0, [2, 2, 20], 8, 1, 1)
    try:
        for first, consumed in ((0, 0), (3, 6), (7, 24)):  # as after loading
            ours = Batches.of_megatron(consumed, first_step=first)
            before = calculator.get_num_microbatches()
            assert ours.before(first) == 0
            assert calculator.get_num_microbatches() == before, "it is left as it is"
            at = consumed
            for step in range(first, first + 12):
                calculator.update_num_microbatches(at)
                assert ours.size(step) == calculator.get_num_microbatches()
                at += ours.size(step)
                assert ours.before(step + 1) == at - consumed
            assert ours.size(first + 11) == 8
        assert [Batches.of_megatron(0, first_step=0).size(step) for step in range(4)] == [2, 2, 2, 2]
    finally:
        calculator.unset_num_microbatches_calculator()


def test_steps_that_are_left_out_take_their_samples():
    from odyssey_megatron.mcore.loop.batches import Batches

    batches = Batches([2, 4], 8, first_step=3, left_out=[1, 4, 6])
    assert [batches.before(step) for step in range(3, 9)] == [0, 2, 6, 14, 22, 30]
    assert batches.sizes == [2, 4, 8]
    assert batches.trained_before(3).total() == 0
    assert batches.trained_before(8) == {2: 1, 4: 0, 8: 2}, "all but the second and the fourth"


def test_the_iterator_yields_the_microbatch_that_is_named():
    from odyssey_megatron.mcore.loop.data import MicrobatchSource

    source = MicrobatchSource(range(100), micro_batch_size=2)
    source.begin(8)
    source.go_to(3)
    assert next(source).tolist() == [14, 15]
    assert next(source).tolist() == [14, 15], "another block of the same hop asks again"
    source.go_to(0)
    assert next(source).tolist() == [8, 9]
    assert source.fetched == {3: [14, 15], 0: [8, 9]}
    source.begin(16)
    assert source.fetched == {}


def test_indices_that_rank_0_has_built_on_another_node_are_said_to_be_missing(
    megatron, tmp_path, monkeypatch
):
    import pretrain_llama
    from torch import distributed as dist

    args = argparse.Namespace(
        data_path="", data_cache_path="", seq_length=16, train_iters=2, global_batch_size=2, seed=1
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    pretrain_llama.build_dataset(args, str(tmp_path / "node0"))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert len(pretrain_llama.build_dataset(args, str(tmp_path / "node0"))) >= 4
    with pytest.raises(ConfigError, match=r"_index.npy does not exist on this node.* --data-cache-path"):
        pretrain_llama.build_dataset(args, str(tmp_path / "node1"))
    args.global_batch_size, args.seq_length = 4000, 8
    with pytest.raises(
        ConfigError, match=r"of 2 iterations of 4000 samples of 8 tokens, seed 1\. If the job was st"
    ):
        pretrain_llama.build_dataset(args, str(tmp_path / "node0"))


def test_an_evaluation_behind_a_checkpoint_is_what_it_would_have_been(make_model):
    """Its samples, and the random numbers of its routers."""
    from odyssey_megatron.mcore.loop.data import MicrobatchSource

    model, found = make_model(), []
    microbatches = model.microbatches
    for evaluated, first in ((0, 5), (3, 2)):
        microbatches.source = MicrobatchSource(range(64), micro_batch_size=1, offset=evaluated)
        model.begin_evaluation(first, 2)
        microbatches.go_to(1)
        found.append((next(microbatches.source).tolist(), microbatches._seeds.step))
    assert found[0] == found[1]
