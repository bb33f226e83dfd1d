"""Flags that Megatron-LM takes one by one, and refuses together: doctor and plan say so alike."""

from __future__ import annotations

import pytest

from odyssey_megatron.cli import main
from odyssey_megatron.doctor.launch_line import judged
from odyssey_megatron.doctor.launch_script import launch_line
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.studies.launch_line import read
from odyssey_megatron.studies.whatif import main_plan

LINE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--vocab-size 1024 --micro-batch-size 2 --bf16"
)
TP4 = "--tensor-model-parallel-size 4"
PP3 = "--pipeline-model-parallel-size 3"
GROUPS = "--group-query-attention --num-query-groups"


@pytest.mark.parametrize(
    ("flags", "said", "taken"),
    [
        ("--seq-length 1026", "embeddings 1024 is below --seq-length 1026: give at least 1026", "--seq-length 1022"),
        (PP3, "--num-layers 8 cannot be divided by --pipeline", f"{PP3} --decoder-first-pipeline-num-layers 2"),
        (PP3, "cannot be divided by .* 3: change", f"{PP3} --account-for-loss-in-pipeline-split"),
        ("--tensor-model-parallel-size 3", "heads 8 is not divisible by --tensor-model-parallel-size 3", TP4),
        (f"--num-attention-heads 12 {TP4} {GROUPS} 6", "6 is neither a multiple nor a div", f"{TP4} {GROUPS} 2"),
        (f"{GROUPS} 3", "groups 3 does not divide --num-attention-heads 8", "--num-query-groups 3"),
        (f"{GROUPS} 3", "does not divide", f"{GROUPS} 3 --multi-latent-attention"),
        ("--num-experts 6 --expert-model-parallel-size 4", "experts 6 is not divisible", "--num-experts 2"),
        ("--expert-model-parallel-size 2", "there are no experts. Give --num-ex", "--expert-model-parallel-size 1"),
        ("--num-experts 4 --moe-router-topk 5", "topk 5 is more than --num-experts 4", "--num-experts 2"),
        ("--num-experts 1", "--moe-router-topk 2 is more than --num-experts 1", "--num-experts 1 --moe-router-topk 1"),
        (
            "--recompute-granularity full",
            "full needs --recompute-method and --recompute-num-layers",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        ("--recompute-granularity some", "--recompute-granularity some: one of", "--recompute-granularity selective"),
        (f"--seq-length 1022 {TP4} --sequence-parallel", "1022 is not divisible by --te", f"--seq-length 1022 {TP4}"),
        (
            f"--seq-length 1020 --context-parallel-size 2 {TP4} --sequence-parallel",
            "1020, of which a context-parallel rank has 510, is not divisible",
            f"--seq-length 1020 --context-parallel-size 2 {TP4}",
        ),
        ("--seq-length 1022 --context-parallel-size 2", "is not divisible by 4, twice", "--context-parallel-size 2"),
    ],
)  # fmt: skip
def test_what_megatron_refuses_neither_starts_nor_is_planned(flags, said, taken):
    found = judged([*LINE.split(), *flags.split()])
    assert not found.starts
    with pytest.raises(ConfigError, match=said):
        read([*LINE.split(), *flags.split()])
    with pytest.raises(ConfigError) as told:
        read([*LINE.split(), *flags.split()])
    assert all(one in str(told.value) for one in found.refused.values()), "the same words"
    assert judged([*LINE.split(), *taken.split()]).starts
    read([*LINE.split(), *taken.split()])


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"torchrun --nproc-per-node 6 a.py {LINE} {TP4}", "the world size (6 ranks) is not divisible by"),
        (f"torchrun --nproc-per-node 8 a.py {LINE} {TP4}", ""),
        (f"torchrun --nproc-per-node 8 a.py {LINE} --global-batch-size 24", "24 is not divisible by 16, "),
        (f"torchrun --nproc-per-node 8 a.py {LINE} --global-batch-size 24 {TP4}", ""),
        (f"torchrun --nproc-per-node 8 a.py {LINE} --global-batch-size 24 --rampup-batch-size 8 8 99", ""),
        (
            f"torchrun --nproc-per-node 2 --nnodes ${{NNODES:-1}} a.py {LINE} {TP4}",
            "Start a multiple of 4 ranks",
        ),
        (f"torchrun --nproc-per-node 6 --nnodes $N a.py {LINE} {TP4}", ""),
    ],
)
def test_the_gpus_that_a_script_starts_are_told_of(script, said):
    """It starts all the same: a template has one node, whatever its sizes."""
    line = launch_line(script)
    found = judged(line.flags, line=line)
    assert found.starts
    assert said in found.of_gpus
    assert bool(found.of_gpus) == bool(said)
    assert found.of_gpus in found.told("a script")
    if said:
        assert "as it is read here the script starts 1 node(s) of " in found.of_gpus


def test_only_a_plan_needs_a_number_of_gpus_that_goes_with_the_sizes(tmp_path):
    path = tmp_path / "train.sh"
    batch = "--global-batch-size $((N * 64))"
    path.write_text(
        f"N=${{SLURM_NNODES:-1}}\ntorchrun --nproc-per-node 2 --nnodes $N a.py {LINE} {TP4} {batch} --odyssey"
    )
    job = ["--job", str(path)]
    assert main(["doctor", *job]) == 0
    with pytest.raises(
        ConfigError, match=r"\(2 ranks\) .* Start a multiple of 4 .* --cluster says on which to plan"
    ):
        main_plan(job)
    assert main_plan([*job, "--cluster", "1x8"]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        "$MORE --expert-model-parallel-size 2",
        "$MORE --num-experts 1",
        "$MORE --recompute-granularity full",
        f"$MORE {PP3}",
        "--tensor-model-parallel-size $TP --sequence-parallel --seq-length 1023",
        "--tensor-model-parallel-size 3 --use-checkpoint-args",
    ],
)
def test_what_only_running_a_script_would_tell_is_not_refused(flags):
    line = launch_line(f"torchrun --nproc-per-node 8 a.py {LINE} {flags}")
    assert judged(line.flags, line=line).starts


def test_branches_of_a_script_are_not_held_against_each_other(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(
        "if [ $S = a ]; then H=8; elif [ $S = b ]; then H=6; fi\nif [ $S = b ]; then TP=3; else TP=4; fi\n"
        f"torchrun a.py {LINE} --num-attention-heads $H --tensor-model-parallel-size $TP"
    )
    assert main(["doctor", "--job", str(path)]) == 0
    assert main(["doctor", "--job", f"S=b {path}"]) == 0
