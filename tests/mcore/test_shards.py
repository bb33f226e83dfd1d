"""Where parameters lie in the buffers of Megatron's distributed optimizer is worked out as Megatron lays them out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.mcore.loop.shards import ParameterPlace, placed_in  # noqa: E402

SHAPES = ((7, 9), (13,), (64, 2), (1,), (5, 5, 5), (300,), (64,), (31, 3))


class Chunk(torch.nn.Module):
    """Parameters of any shape; those in ``shared`` are in another stage, too."""

    def __init__(self, shapes, shared):
        super().__init__()
        for place, shape in enumerate(shapes):
            parameter = torch.nn.Parameter(torch.zeros(shape))
            parameter.shared_embedding = place in shared
            self.register_parameter(f"p{place}", parameter)


@pytest.mark.parametrize("bucket_numel", [None, 1, 100, 130, 400])
@pytest.mark.parametrize("shared", [(), (0,), (7,), (3,), (4, 5)], ids=str)
def test_each_parameter_lies_where_megatron_puts_it(megatron, bucket_numel, shared):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    chunk = Chunk(SHAPES, shared)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=bucket_numel is not None, bucket_size=bucket_numel
    )
    ddp = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
        config,
        chunk,
        pg_collection=megatron,
    )
    (buffer,) = ddp.buffers
    buckets = [(f"bucket {one.bucket_id}", one.numel_unpadded) for one in buffer.buckets]
    expected = {}
    for place, (_, parameter) in enumerate(chunk.named_parameters()):
        start, _, bucket = buffer.param_index_map[parameter]
        key, numel = buckets[bucket]
        expected[place, ""] = ParameterPlace(
            bucket=key, start=start - buffer.buckets[bucket].offset, bucket_numel=numel
        )
    parameters = [((place, ""), parameter.numel()) for place, parameter in enumerate(chunk.parameters())]
    assert dict(placed_in(buckets, parameters)) == expected
    if bucket_numel == 100:
        assert len(buckets) > 3


@pytest.mark.parametrize(
    "buckets",
    [
        [],
        [("a", 200)],
        [("a", 192), ("b", 64)],
        [("a", 192), ("b", 72)],
        [("a", 264)],
        [("a", 191), ("b", 71)],
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_placed_as_a_whole(buckets):
    parameters = [((0, "first"), 71), ((0, "second"), 64), ((0, "third"), 128)]
    fits = [("a", 192), ("b", 71)]
    assert len(dict(placed_in(fits, parameters))) == 3
    assert len(dict(placed_in(buckets, parameters))) < 3


@pytest.mark.parametrize(("saved", "now", "use"), [(1, 2, "1"), (4, 1, "one above 1")])
def test_one_optimizer_is_not_loaded_as_two(saved, now, use):
    from odyssey_megatron.errors import ConfigError
    from odyssey_megatron.mcore.loop.shards import Saved

    checkpoint = Saved()
    checkpoint.check_experts(1)  # begun anew
    checkpoint.args = SimpleNamespace(expert_model_parallel_size=saved)
    checkpoint.check_experts(saved * 2 if saved > 1 else 1)
    with pytest.raises(
        ConfigError, match=f"--expert-model-parallel-size {saved}, and this job has {now}.*Use {use},"
    ):
        checkpoint.check_experts(now)
