"""The launch scripts that Megatron-LM itself publishes (``examples/*/*.sh``), shrunk in sizes alone, beside plain
Megatron-LM: the flags are read from the scripts as ``odyssey doctor --job`` reads them.
"""

from __future__ import annotations

import pytest

from odyssey_megatron.doctor.launch_line import judged, read_job
from odyssey_megatron.upstream.source import Source
from tests.megatron_lm.cases import NEEDS, shrunk
from tests.megatron_lm.jobs import FLOAT32, FLOAT64, assert_same_lines

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]

PARALLEL = {
    "--tensor-model-parallel-size": 2, "--pipeline-model-parallel-size": 2, "--expert-model-parallel-size": 2,
}  # fmt: skip
"""At most."""
SAMPLES = {
    "--train-samples": 72, "--lr-warmup-samples": 12, "--lr-decay-samples": 66, "--lr-warmup-iters": 2,
    "--lr-decay-iters": 6,
}  # fmt: skip
"""What a recipe that has the flag gets in its place."""
ELSEWHERE = ("--fp8", "--tiktoken", "--use-mcore", "--profile")
"""What begins so is left out, too: Transformer Engine, a profiler, a tokenizer's file."""
RECIPES = {
    # script, the job's, faults
    "gpt3": ("gpt3/train_gpt3_175b_distributed.sh", "pretrain_gpt.py", "rank=6,step=2,at=backward"),
    "llama": ("llama/train_llama3_8b_h100_fp8.sh", "pretrain_gpt.py", "rank=1,step=2,at=reduce"),
    "mixtral": ("mixtral/train_mixtral_8x7b_distributed.sh", "pretrain_gpt.py", "rank=2,step=3,at=optimizer"),
    "mamba": ("mamba/train.sh", "pretrain_mamba.py", "rank=3,step=2,at=weight_grad"),
}


def flags_of(job):
    """``{"--flag": value}`` of the launch script ``job``, as a case has them."""
    found, flag = {}, ""
    for word in read_job(str(job)).flags:
        if word.startswith("--"):
            flag, found[word] = word, True
        else:
            value = int(word) if word.isdigit() else word
            found[flag] = value if found[flag] is True else f"{found[flag]} {value}"
    return found


def small(job):
    """(flags, ranks, stages)."""
    flags = {
        flag: min(PARALLEL.get(flag, value), value) if flag in PARALLEL else SAMPLES.get(flag, value)
        for flag, value in flags_of(job).items()
        if flag not in NEEDS and not flag.startswith(ELSEWHERE)
    }
    if "--train-iters" in flags:  # with which Megatron-LM itself refuses it
        flags.pop("--rampup-batch-size", None)
    if "--step-batch-size-schedule" in flags:  # of one word
        flags["--step-batch-size-schedule"] = flags["--step-batch-size-schedule"].replace(" ", ",")
    return shrunk(flags)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_loses_a_rank_and_prints_what_it_would_have(jobs, name, recipe):
    assert_recipe(jobs, name, recipe)


@pytest.mark.parametrize(
    "recipe", [one for one in RECIPES if one != "mamba"]
)  # it has a pattern of 56 layers there
def test_a_recipe_of_a_newer_version(other_jobs, name, recipe):
    assert_recipe(other_jobs, name, recipe)


def assert_recipe(jobs, name, recipe):
    script, of, inject = RECIPES[recipe]
    job = jobs.checkout / "examples" / script
    if recipe == "mamba":
        pytest.importorskip("einops", reason="Megatron's state spaces need it")
    refused = judged(read_job(str(job)).flags, Source((jobs.checkout,)).version()).refused
    assert set(refused) <= {"--fp8-recipe"}, "delayed scaling alone, which needs a GPU"
    flags, ranks, stages = small(job)
    how = {"ranks": ranks, "stages": stages, "model": flags, "script": of}
    plain = jobs.plain("", **how)
    more = "--odyssey-redundancy state"
    run = jobs.odyssey(name, more, inject=inject, **how)
    assert_same_lines(run, plain, rel=2e-3 if "--fp16" in flags else FLOAT32)
    assert len(run.killed) >= 1
    if "--fp16" not in flags:
        whole = jobs.odyssey(f"{name}-whole", f"{more} --odyssey-float64 on", **how)
        exact = jobs.odyssey(f"{name}-exact", f"{more} --odyssey-float64 on", inject=inject, **how)
        assert_same_lines(exact, whole, rel=FLOAT64)
