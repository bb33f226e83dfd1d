import argparse
import re

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.studies.scenario import add_scenario_arguments, scenario_from

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --swiglu --bf16 "
    "--sequence-parallel --untie-embeddings-and-output-weights --padded-vocab-size 32000 --attention-dropout 0 "
    "--hidden-dropout 0"
)
"""Llama-2 7B as a launch line."""


def scenario(flags):
    parser = argparse.ArgumentParser()
    add_scenario_arguments(parser)
    return scenario_from(*parser.parse_known_args(flags.split()))


@pytest.mark.parametrize(
    "recomputed",
    [
        "",
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ],
)
def test_a_named_model_is_trained_as_the_flags_beside_it_say(recomputed):
    """As the launch line of that model with these flags."""
    flags = f"--cluster 1x8 --pipeline-model-parallel-size 2 --global-batch-size 64 --seq-length 2048 {recomputed}"
    named, own = scenario(f"--model llama2-7b {flags}"), scenario(f"{LLAMA} {flags}")
    assert named.job == own.job
    assert named.job.tokens_per_step == 64 * 2048
    assert named.profile == own.profile
    assert named.profile.costs != scenario(f"--model llama2-7b {flags[: flags.index('--seq')]}").profile.costs


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(
        ConfigError, match="--global-batch-size 63 is not divisible by 4, .* 4 data-parallel replicas"
    ):
        scenario("--model llama2-7b --cluster 1x8 --pipeline-model-parallel-size 2 --global-batch-size 63")


SIXTHS = "--model llama2-7b --cluster 1x6 --pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("flags", "said", "taken"),
    [
        (f"{SIXTHS} 2 --tensor-model-parallel-size 3", "heads 32 is not divisible by --tensor-m", f"{SIXTHS} 2"),
        (f"{SIXTHS} 3", "layers 32 cannot be divided by", f"{SIXTHS} 3 --decoder-first-pipeline-num-layers 10"),
        (
            f"{SIXTHS} 1 --context-parallel-size 2 --seq-length 4097",
            "4097 is not divisible by 4, twice --context",
            f"{SIXTHS} 1 --context-parallel-size 2 --seq-length 4100",
        ),
        (
            "--model mixtral-8x7b --cluster 2x6 --pipeline-model-parallel-size 4 --expert-model-parallel-size 3",
            "--num-experts 8 is not divisible by --expert-model-parallel-size 3",
            "--model mixtral-8x7b --cluster 2x8 --pipeline-model-parallel-size 4 --expert-model-parallel-size 4",
        ),
        (
            f"{SIXTHS} 2 --recompute-granularity full",
            "full needs --recompute-method and --recompute-num-layers: uniform and 1",
            f"{SIXTHS} 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        (f"{SIXTHS} 2 --recompute-granularity some", "--recompute-granularity some: one of", f"{SIXTHS} 2"),
        (
            "--model llama2-7b --cluster 1x8 --tensor-model-parallel-size 2 --seq-length 4097",
            "is not divisible by --tensor-model-parallel-size 2, as --sequence-parallel",
            "--model llama2-7b --cluster 1x8 --tensor-model-parallel-size 2 --seq-length 4098",
        ),
    ],
)  # fmt: skip
def test_what_megatron_refuses_together_is_not_planned(flags, said, taken):
    with pytest.raises(ConfigError, match=said):
        scenario(flags)
    scenario(taken)


def test_stages_of_a_named_model_may_be_uneven():
    flags = "--model deepseek-v3 --cluster 8x8 --pipeline-model-parallel-size 16"
    ends = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
    assert scenario(f"{flags} {ends}").job.stage_layers == (3, *[4] * 14, 2)


@pytest.mark.parametrize("batch", ["--global-batch-size 64", "--global-batch-size=64"])
def test_a_batch_and_microbatches_are_not_given_together(batch):
    flags = "--model llama2-7b --cluster 1x8 --pipeline-model-parallel-size 2"
    with pytest.raises(ConfigError, match="--num-microbatches and --global-batch-size both say"):
        scenario(f"{flags} --num-microbatches 16 {batch}")


@pytest.mark.parametrize(
    "flags",
    [
        "--model llama2-70b --tensor-model-parallel-size 8",
        "--model qwen3-30b-a3b --expert-model-parallel-size 8",
    ],
)
def test_ranks_of_a_worker_exchange_by_the_nodes_of_the_cluster(flags):
    """Eight ranks on two nodes of four have a network card between them, unless they are in one rack of 72."""

    def layer_s(cluster, *more):
        found = scenario(" ".join((flags, f"--cluster {cluster} --pipeline-model-parallel-size 1", *more)))
        return found.profile.costs.layers[1].forward_s, found.notes

    near, far = (layer_s(cluster)[0] for cluster in ("2x8", "4x4"))
    assert far > 1.8 * near
    (near, told), (far, _) = (layer_s(cluster, "--accelerator gb200") for cluster in ("4x4", "2x8"))
    assert near == far
    assert "the 72 GPUs that NVLink joins in a rack of gb200s, and not by nodes of 4" in "\n".join(told)


@pytest.mark.parametrize(
    ("model", "cluster", "share"), [("mixtral-8x7b", "2x8", 0), ("qwen3-30b-a3b", "4x4", 62)]
)
def test_it_is_said_where_much_of_the_time_is_exchange(model, cluster, share):
    """None of it is taken to be hidden, as it may be in a job."""
    found = scenario(
        f"--model {model} --cluster {cluster} --expert-model-parallel-size 8 --pipeline-model-parallel-size 2"
    )
    (told,) = [one for one in found.notes if "of the GPU's peak" in one]
    said = re.findall("which is ([0-9]+)% of layers' time, as none of it counts as hidden; --fit", told)
    assert said == [str(share)] * bool(share)
