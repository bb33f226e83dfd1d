"""--optimizer muon, with NVIDIA's own package: momentum for matrices, Adam for the rest. It works in float32 only."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import ROUNDING, assert_equal_numbers, assert_holders_agree
from tests.megatron_lm.jobs import FLOAT32, MOCK, assert_same_iterations, assert_same_lines, behind_a_load

pytest.importorskip(
    "emerging_optimizers.orthogonalized_optimizers.muon", reason="needs NVIDIA's emerging_optimizers"
)

MUON = "--optimizer muon --lr 0.001 --muon-momentum 0.95"
KILLS = "rank=0,step=1,at=optimizer;rank=4,step=2,at=commit;rank=3,step=3,at=backward"
SIZES = {"ranks": 6, "stages": 2}


def test_losses_are_those_of_plain_megatron(jobs, name):
    """Though three ranks die; and not those of Adam, from the second step on."""
    run = jobs.odyssey(name, f"{MOCK} {MUON}", inject=KILLS, **SIZES)
    plain = jobs.plain(f"{MOCK} {MUON}", **SIZES)
    assert run.killed == [0, 3, 4], run.log[-3000:]
    assert_same_lines(run, plain, rel=FLOAT32)
    assert_holders_agree(run)
    adam = jobs.plain(f"{MOCK} --lr 0.001", **SIZES)
    assert [one.loss for one in adam.iterations[2:]] != pytest.approx(
        [one.loss for one in plain.iterations[2:]], rel=1e-4
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    "more",
    [
        "--tensor-model-parallel-size 2 --muon-use-nesterov --group-query-attention --num-query-groups 2",
        "--num-experts 4 --expert-model-parallel-size 2 --moe-router-load-balancing-type none --disable-bias-linear",
        "--position-embedding-type learned_absolute --muon-no-split-qkv",
        "--swiglu --untie-embeddings-and-output-weights",
    ],
    ids=["tensor-parallel", "experts", "positions", "gated"],
)
def test_other_layers(jobs, name, more):
    run = jobs.odyssey(name, f"{MOCK} {MUON} {more}", inject="rank=2,step=2,at=backward", ranks=8, stages=2)
    plain = jobs.plain(f"{MOCK} {MUON} {more}", ranks=8, stages=2)
    assert 2 in run.killed, run.log[-3000:]
    assert_same_lines(run, plain, rel=FLOAT32)


@pytest.mark.matrix
def test_in_bf16(jobs, name):
    whole = jobs.odyssey(f"{name}-reference", f"{MOCK} {MUON} --bf16", **SIZES)
    run = jobs.odyssey(name, f"{MOCK} {MUON} --bf16", inject=KILLS, **SIZES)
    assert run.exit_code == 0, run.log[-3000:]
    assert_equal_numbers(run.run.steps, whole.run.steps, rel=ROUNDING)
    assert_holders_agree(run)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("theirs", "more"),
    [("muon", ""), ("muon", "--bf16"), ("dist_muon", "--bf16")],  # plain dist_muon saves in 16 bits only
    ids=["float32", "bf16", "spread-bf16"],
)
def test_checkpoints_go_both_ways(jobs, name, theirs, more):
    """Plain Megatron-LM's are loaded, and what is saved here, in another layout, plain Megatron-LM goes on with."""
    spread = f"{MUON.replace('muon', theirs, 1)} {more}"
    first, second = (jobs.folder / f"{name}-{one}" for one in ("theirs", "ours"))
    jobs.plain(f"{MOCK} {spread} --save {first} --save-interval 2 --exit-interval 2", ranks=4, stages=2)
    saves = f"--load {first} --save {second} --save-interval 2 --exit-interval 4"
    run = jobs.odyssey(
        name, f"{MOCK} {spread} {saves}", ranks=8, stages=4, inject="rank=1,step=3,at=backward"
    )
    assert run.exit_code == 0, run.log[-3000:]
    assert run.killed == [1]
    resumed = jobs.plain(f"{MOCK} {spread} --load {second}", ranks=4, stages=2)
    unbroken = jobs.plain(f"{MOCK} {spread}", ranks=4, stages=2)
    rel = ROUNDING if more else FLOAT32
    assert_same_iterations(run.iterations, behind_a_load(unbroken.iterations[2:4]), rel=rel)
    assert_same_iterations(resumed.iterations, behind_a_load(unbroken.iterations[4:]), rel=rel)
