"""What is left of a tensor-parallel cell of an unmodified Megatron-LM job goes on as a smaller cell: same numbers."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import assert_equal_numbers, assert_holders_agree, cases_of
from tests.megatron_lm.jobs import FLOAT64, MOCK, assert_equal_checkpoints, assert_same_lines
from tests.megatron_lm.test_experts import DEEPSEEK, GANGS, MIXTRAL

pytestmark = pytest.mark.timeout(500)
LONG = f"{MOCK} --train-iters 90 --eval-interval 45"
CELLS = f"{LONG} --tensor-model-parallel-size 2"
STEPS = f"{LONG} --odyssey-float64 on --save-interval 30 --log-params-norm --log-num-zeros-in-grad"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SLICES = "--use-distributed-optimizer"
WAYS = {
    "activations": "--tensor-model-parallel-size 2",
    "pieces": "--tensor-model-parallel-size 2 --sequence-parallel",
    "contexts": "--context-parallel-size 2",
    "contexts-slices": "--context-parallel-size 2 --use-distributed-optimizer",
    "gangs": f"{DEEPSEEK} --moe-router-dtype fp64 --moe-router-bias-update-rate 1e-3 {GANGS} {RECOMPUTED}",
    "gangs-slices": f"{MIXTRAL} {GANGS} --use-distributed-optimizer",
}
ALWAYS = {"activations", "pieces"}
LOST = "rank=5,step=2,at=backward;rank=5,step=-1,at=groups,incarnation=1"
"""Rank 5 dies until it is not started any more, and rank 4 goes on without it."""
THEN = "rank=6,step=50,at=backward"
"""By then rank 4 computes, beside ranks 6 and 7, which come back, and are filled by it."""
IN_THE_OTHER = "rank=2,step=58,at=backward"
"""The same with a gang of four, whose other ranks come back."""


def goes_on(jobs, name, flags, *, then, left, alone, **how):
    """Rank 5 is lost, and ``left`` go on without it; the others have failures ``then``, whose step ``left`` and others
    who have no holder of their layers do ``alone``. All numbers and checkpoints are those of a job without failures.
    """
    folders = [jobs.folder / f"{name}-{one}" for one in ("whole", "ours")]
    whole = jobs.odyssey(f"{name}-whole", f"{flags} --save {folders[0]}", **how)
    ours = f"{flags} --odyssey-respawn 1 --odyssey-policy reroute --save {folders[1]}"
    run = jobs.odyssey(name, ours, inject=f"{LOST};{then}", **how)
    assert_same_lines(run, whole, rel=FLOAT64)
    (shrunk,) = run.named("cell_shrinks")
    assert shrunk["ranks"] == left
    assert len(left) < shrunk["whole"]
    begun = {event["generation"]: event for event in run.named("generation_started")}
    at = int(then.partition("step=")[2].partition(",")[0])
    assert [at] == [one["step"] for one in begun.values() if one["members"] == alone], (
        "they have all layers then"
    )
    assert begun[max(begun)]["members"] == [rank for rank in range(8) if rank != 5]
    for iteration in (30, 60, 90):
        assert_equal_checkpoints(folders[1], folders[0], iteration)
    return run


@pytest.mark.parametrize("way", cases_of(WAYS, ALWAYS))
def test_a_cell_goes_on_with_half_of_its_ranks(jobs, name, way):
    flags, alone = f"{STEPS} {WAYS[way]}", [0, 1, 2, 3, 4]
    run = goes_on(jobs, name, flags, then=THEN, left=[4], alone=alone, ranks=8, stages=2)
    ended = {event["rank"]: event["digest"] for event in run.named("weights")}
    assert ended[4].items() == (ended[6] | ended[7]).items(), "all parts, each to the last bit"


@pytest.mark.matrix
@pytest.mark.parametrize("state", ["", "--use-distributed-optimizer"], ids=["whole", "slices"])
def test_three_ranks_of_a_gang_alone_save_and_fill_another(jobs, name, state):
    """Each has the experts of more than one of a whole gang's ranks, but one, which has those of fewer than one."""
    router = "--moe-router-dtype fp64 --moe-router-bias-update-rate 1e-3"
    flags = f"{STEPS} {DEEPSEEK} {router} {RECOMPUTED} --expert-model-parallel-size 4 --global-batch-size 16"
    three = [4, 5, 6]
    goes_on(
        jobs, name, f"{flags} {state}".strip(), then=IN_THE_OTHER, left=three, alone=three, ranks=8, stages=1
    )


def test_plain_megatron_goes_on_with_what_a_smaller_cell_has_saved(jobs, name):
    saved = jobs.folder / f"{name}-saved"
    save = f"--save {saved} --save-interval 80 --exit-interval 80"
    ours = f"{CELLS} --odyssey-respawn 1 --odyssey-policy reroute {save}"
    run = jobs.odyssey(
        name, ours, ranks=8, stages=2, inject=f"{LOST};{THEN};rank=7,step=-1,at=groups,incarnation=1"
    )
    assert run.exit_code == 0, run.log[-4000:]
    last = run.named("decision")[-1]
    assert [2, 1] in last["shapes"]
    assert last["layout"]["holders"][-1][0] == 2, "the first holder of the head has written it"
    load = f"{CELLS} --load {saved} --exit-interval 84"
    with_ours = jobs.odyssey(f"{name}-whole", load, ranks=8, stages=2)
    assert_same_lines(with_ours, jobs.plain(load, ranks=8, stages=2), first=81)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cells", ["--context-parallel-size 2", f"{MIXTRAL} {GANGS}"], ids=["contexts", "gangs"]
)
def test_what_is_saved_beside_a_smaller_cell_goes_on_in_another_layout(jobs, name, cells):
    """Of four cells three keep each slice, the smaller one among them; the job that goes on has two owners, and loses a
    rank.
    """
    folder = jobs.folder / f"{name}-saved"
    flags = STEPS.replace("--train-iters 90", "--train-iters 60")
    cut = f"{flags} {cells} {SLICES} --odyssey-redundancy-level 2 --global-batch-size 16"
    whole = jobs.odyssey(f"{name}-whole", cut, ranks=8, stages=1)
    run = jobs.odyssey(
        f"{name}-smaller",
        f"{cut} --odyssey-respawn 1 --odyssey-policy reroute --save {folder}",
        inject=LOST,
        ranks=8,
        stages=1,
    )
    assert_same_lines(run, whole, rel=FLOAT64)
    assert [2, 1] in run.named("decision")[-1]["shapes"]
    flags = f"{flags} {cells} {SLICES} --global-batch-size 16 --load {folder} --ckpt-step 30"
    run = jobs.odyssey(name, flags, ranks=4, stages=1, inject="rank=1,step=32,at=optimizer")
    assert run.exit_code == 0, run.log[-4000:]
    assert_equal_numbers(run.run.steps, whole.run.steps[30:], rel=FLOAT64)
    assert_holders_agree(run)
