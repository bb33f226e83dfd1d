"""Cells whose ranks have each a part of the sequence: what they compute together is what one of them would, and with
one of them all are lost.
"""

from __future__ import annotations

import pytest

from tests.e2e.jobs import TOLERANCE, assert_equal_numbers, assert_equal_runs

pytestmark = pytest.mark.matrix

JOB = "--num-layers 4 --global-batch-size 6"
CONTEXT = f"{JOB} --context-parallel-size 2"
SHARDED = f"{JOB} --tensor-model-parallel-size 2 --sequence-parallel --qk-layernorm"
BOTH = f"{SHARDED} --context-parallel-size 2"
TIED = "--share-embeddings-and-output-weights"
RANKS = 8  # four workers of CONTEXT


@pytest.mark.parametrize(
    ("parts", "whole", "ranks"),
    [
        (CONTEXT, JOB, 2),
        (f"{JOB} --context-parallel-size 4", JOB, 4),
        (BOTH, SHARDED, 4),
    ],
)
def test_it_changes_nothing(undisturbed, parts, whole, ranks):
    ours, theirs = undisturbed(parts, ranks=ranks), undisturbed(whole)
    assert_equal_numbers(ours.run.steps, theirs.run.steps, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("flags", "stages", "inject"),
    [
        ("", 2, "rank=3,step=2,at=backward;rank=4,step=4,at=reduce"),
        ("--use-distributed-optimizer", 1, "rank=1,step=1,at=param_gather;rank=6,step=3,at=agreement"),
        ("--odyssey-policy replan", 2, "rank=5,step=2,at=forward;rank=2,step=2,at=transfer,generation=2"),
        ("--share-embeddings-and-output-weights", 2, "rank=0,step=2,at=optimizer"),
        ("--hidden-dropout 0.1", 2, "rank=7,step=2,at=weight_grad"),
    ],
)
def test_a_run_that_loses_cells_of_context_ranks_equals_one_that_does_not(
    jobs, undisturbed, name, flags, stages, inject
):
    shot = jobs.run(name, ranks=RANKS, stages=stages, flags=f"{CONTEXT} {flags} --odyssey-inject {inject}")
    model = CONTEXT if "odyssey" in flags or "optimizer" in flags else f"{CONTEXT} {flags}".strip()
    assert_equal_runs(shot, undisturbed(model), kills=inject.count("rank="))


@pytest.mark.parametrize(
    ("job", "flags", "ranks", "stages", "inject"),
    [
        (
            CONTEXT,
            "--odyssey-policy replan",
            RANKS,
            2,
            "rank=5,step=2,at=optimizer;rank=2,step=3,at=transfer",
        ),
        (
            CONTEXT,
            "--odyssey-redundancy-level 2",
            RANKS,
            1,
            "rank=0,step=1,at=reduce;rank=4,step=2,at=param_gather",
        ),
        (CONTEXT, "--odyssey-spare-state host", RANKS, 2, "rank=3,step=2,at=backward"),
        (f"{CONTEXT} {TIED}", "", RANKS, 2, "rank=7,step=2,at=agreement"),
        (f"{JOB} --context-parallel-size 4", "", RANKS, 1, "rank=6,step=1,at=param_gather"),
        (BOTH, "", RANKS, 1, "rank=6,step=2,at=optimizer"),
    ],
)
def test_ranks_with_a_stretch_each_of_the_optimizer_state(
    jobs, undisturbed, name, job, flags, ranks, stages, inject
):
    shot = jobs.run(
        name,
        ranks=ranks,
        stages=stages,
        flags=f"{job} --use-distributed-optimizer {flags} --odyssey-inject {inject}",
    )
    whole = {CONTEXT: CONTEXT, f"{CONTEXT} {TIED}": f"{CONTEXT} {TIED}", BOTH: SHARDED}.get(job, JOB)
    assert_equal_runs(shot, undisturbed(whole), kills=inject.count("rank="))


def test_optimizer_state_is_cut_over_context_ranks_too(jobs, undisturbed, name):
    """As in Megatron's distributed optimizer, and kept twice."""
    shot = jobs.run(name, ranks=RANKS, stages=1, flags=f"{CONTEXT} --use-distributed-optimizer")
    assert_equal_runs(shot, undisturbed(CONTEXT), kills=0)
    (whole,) = {event["optimizer_bytes"] for event in undisturbed(CONTEXT).named("weights")}
    assert max(event["optimizer_bytes"] for event in shot.named("weights")) <= 1.05 * whole * 2 / RANKS


def test_with_tensor_parallelism(jobs, undisturbed, name):
    """Cells of four. A weight that all of a cell have is in the sum of every part once."""
    shot = jobs.run(name, ranks=RANKS, stages=1, flags=f"{BOTH} --odyssey-inject rank=6,step=2,at=reduce")
    assert_equal_runs(shot, undisturbed(SHARDED), kills=1)


@pytest.mark.parametrize("state", ["", "--odyssey-redundancy state", "--use-distributed-optimizer"])
def test_a_cell_of_context_ranks_comes_back(jobs, undisturbed, name, state):
    """All its ranks join, and each is filled by the one in the same place; kept alive without data parallelism, too."""
    job = f"{CONTEXT} --train-iters 40"
    ranks = 4 if "state" in state else RANKS
    flags = f"{job} {state} --odyssey-respawn 1 --odyssey-inject rank=3,step=2,at=backward"
    shot = jobs.run(name, ranks=ranks, stages=2, flags=flags)
    assert_equal_runs(shot, undisturbed(job), kills=1)
    started = shot.named("generation_started")
    last = max(event["generation"] for event in started)
    assert {len(event["members"]) for event in started if event["generation"] == last} == {ranks}
    # Not the plan's hash: layers, or slices, may have to move back, and the plan says which.
    plans = {event["generation"]: (event["layout"], event["schedule"]) for event in shot.named("decision")}
    if "optimizer" not in state:  # slices move behind the first step of the last plan
        assert plans[last] == plans[1]
