import re

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.studies.whatif import main_plan

OWN = (
    "--num-layers 10 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 2048 --bf16 --swiglu "
    "--untie-embeddings-and-output-weights --global-batch-size 16 --pipeline-model-parallel-size 2 --cluster 1x8 "
    "--gpu-memory-gib 4"
)


def refused(flags):
    with pytest.raises(ConfigError) as caught:
        main_plan(flags.split())
    return str(caught.value)


def test_what_makes_room_is_said():
    said = refused(OWN)
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert f"a larger --context-parallel-size or {full} does." in said
    more = f"{OWN} --micro-batch-size 4"
    full = f"{more} {full}"
    # The head's, which is not computed again, are left.
    needs, less = (float(re.search(r"needs ([\d.]+) GiB", refused(one))[1]) for one in (more, full))
    assert needs - less > 4
    assert "GiB are for what is run again" in refused(full)
    assert "a smaller --micro-batch-size or a larger --context-parallel-size does." in refused(full)
    smaller = "a larger --context-parallel-size or a smaller --recompute-num-layers does."
    assert smaller in refused(full.replace("num-layers 1", "num-layers 2"))
    assert "--recompute-method uniform" in refused(full.replace("uniform", "block"))
    whole = full.replace("uniform --recompute-num-layers 1", "block --recompute-num-layers 5")
    assert "--recompute-granularity" not in refused(whole), "each of two stages has five layers"
    assert "A smaller --odyssey-memory-headroom-percent lets plans use more." in said
    assert "Of this a job would only warn, and start without regard to memory." in said


def test_what_is_run_again_may_take_all_memory():
    said = refused(
        "--cluster 1x8 --model llama2-7b --pipeline-model-parallel-size 2 --num-microbatches 4 --micro-batch-size 4 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 16 --gpu-memory-gib 24"
    )
    assert "0 bytes may be used" in said
    assert "a smaller --recompute-num-layers" in said


def test_second_copies_of_optimizer_state_are_said():
    """Each of four holders keeps two of the four slices of a layer, of which another one sends one."""
    whole, sliced = (refused(f"{OWN}{more}") for more in ("", " --use-distributed-optimizer"))
    assert "only a failure needs" not in whole
    state, spare = re.search(
        r"\(([\d.]+) GiB of state, ([\d.]+) GiB of it copies of optimizer state that only a failure", sliced
    ).groups()
    (all_of_it,) = re.search(r"\(([\d.]+) GiB of state", whole).groups()
    # Without slices a holder keeps all four, and so two more.
    assert float(all_of_it) - float(state) == pytest.approx(2 * float(spare), abs=0.2)


def test_what_the_costs_rest_on_is_said_with_the_error():
    said = refused(f"{OWN} --fp8-format hybrid")
    counted = "--fp8-format is not counted: layers take the time and the memory that they take in bf16."
    assert said.startswith(f"{counted} So counted, the healthy job does not fit: ")
    assert said.count(counted) == 1
    assert "Note: a job would refuse the default of --fp8-recipe: odyssey doctor says why." in said
    assert "Note: costs are estimated from FLOPs" in said
