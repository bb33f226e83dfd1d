"""Cells that lose ranks for good go on with fewer: the same numbers, whatever sizes work together."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from odyssey_megatron.metrics.steps import loss_difference
from tests.benchmarks.bars import norm_difference
from tests.e2e.jobs import BFLOAT16, ROUNDING, Outcome, assert_equal_runs, assert_holders_agree
from tests.e2e.test_experts import DEEPSEEK, MIXTRAL
from tests.e2e.test_tensor_parallel import CELLS, RANKS, SEQUENCE, STAGES

LONG = "--train-iters 45 --global-batch-size 12"
SMALL_CELL = (
    "--tensor-model-parallel-size 2 --sequence-parallel --num-layers 2 --train-iters 22 --global-batch-size 8"
)
SPENT = "--odyssey-hang-s 10 --odyssey-respawn 1 --odyssey-policy reroute --odyssey-inject"
DEFAULT = "--odyssey-hang-s 10 --odyssey-shrink auto --odyssey-policy reroute --odyssey-inject"
"""By routes, a plan uses whatever there is: of layers as small as these half a cell would be left out."""
FOUR = "--tensor-model-parallel-size 4 --num-query-groups 4 --num-layers 2 --global-batch-size 4"
CONTEXT = "--context-parallel-size 2 --num-layers 4 --global-batch-size 6"
CONTEXTS = "--context-parallel-size 4 --num-layers 2 --global-batch-size 4"
BOTH = f"{FOUR.replace('size 4', 'size 2', 1)} --context-parallel-size 2 --sequence-parallel"
CALM = "--lr 1e-3 --num-layers 4 --global-batch-size 12"
"""A norm that leaps shows what is rounded elsewhere."""
GANG = f"{DEEPSEEK} --expert-model-parallel-size 2 {CALM}"
GANGS = (
    f"{MIXTRAL} --num-experts 4 --expert-model-parallel-size 4 {CALM} --num-layers 2 --global-batch-size 24"
)
UNEVEN = GANGS.replace("--num-experts 4", "--num-experts 8")
SMALL_GANG = f"{GANG} --num-layers 2 --global-batch-size 8"
WIDE_GANGS = f"{GANG} --tensor-model-parallel-size 2 --sequence-parallel"
TIED = "--share-embeddings-and-output-weights"
SLICES = "--use-distributed-optimizer"
ONE_AFTER_THE_OTHER = ";".join(
    f"rank=4,step=-1,at=agreement,incarnation={one};rank=4,step=-1,at=groups,incarnation={one + 1}"
    for one in (2, 4)
)
"""Of a cell of rank 4 and others, that has come back once: rank 4 is lost for good, and then what plays it."""
HASHED = "--check-weight-hash-across-dp-replicas-interval 1"
matrix = pytest.mark.matrix
pytestmark = pytest.mark.timeout(300)


def lost(rank: int, step: int, incarnation: int = 0) -> str:
    """``rank`` dies in ``step``, and for good when it has come back."""
    first = f"rank={rank},step={step},at=backward,incarnation={incarnation}"
    return f"{first};rank={rank},step=-1,at=groups,incarnation={incarnation + 1}"


def decisions(shot: Outcome) -> list[dict[str, Any]]:
    """That came into effect."""
    begun = {event["generation"] for event in shot.named("generation_started")}
    return [event for event in shot.named("decision") if event["generation"] in begun]


def trained(shot: Outcome) -> list[list[list[int]]]:
    """The shapes of the smaller cells that held anything, in the order in which they did."""
    found = []
    for event in decisions(shot):
        holders = {worker for one in event["layout"]["holders"] for worker in one}
        shapes = [shape for shape in event["shapes"] if shape[0] in holders]
        if shapes != (found[-1] if found else []):
            found.append(shapes)
    return found


@pytest.mark.parametrize(
    ("job", "ranks", "stages"),
    [
        pytest.param(SMALL_CELL, 4, 1, id="small", marks=matrix),
        *(
            pytest.param(f"{cells} {LONG}", RANKS, STAGES, marks=matrix)
            for cells in (
                CONTEXT,
                CELLS,
                SEQUENCE,
                f"{CONTEXT} --window-size 5,0 --calculate-per-token-loss",
                f"{CONTEXT} {TIED} {HASHED}",
            )
        ),
    ],
)
def test_what_is_left_of_a_cell_trains_on(jobs, undisturbed, name, job, ranks, stages):
    """Also where its ranks have each a part of the sequence: of this, rank 2 has all from then on."""
    shot = jobs.run(name, ranks=ranks, stages=stages, flags=f"{job} {SPENT} {lost(3, 1)}", timeout_s=200.0)
    assert_equal_runs(shot, undisturbed(job), kills=2)
    (shrinks,) = shot.named("cell_shrinks")
    assert (shrinks["ranks"], shrinks["whole"]) == ([2], 2)
    assert trained(shot) == [[[1, 1]]]
    begun = {event["generation"]: event["members"] for event in shot.named("generation_started")}
    assert begun[max(begun)] == [0, 1, 2, *range(4, ranks)]


@pytest.mark.parametrize(
    ("job", "stages"),
    [
        pytest.param(SMALL_CELL, 1, id="small"),
        pytest.param(f"{SMALL_CELL} --num-query-groups 1", 1, id="fewer query groups than ranks"),
        pytest.param(f"{CONTEXT} {SLICES} {LONG}", STAGES, marks=matrix),
        pytest.param(f"{GANG} --train-iters 90", STAGES, marks=matrix),
    ],
)
def test_by_default_who_is_dead_stays_away_and_what_is_left_joins(jobs, undisturbed, name, job, stages):
    """It trains where that pays: with layers as small as the first job's, a busy machine may say that it does not."""
    flags = f"{job} {DEFAULT} rank=3,step=1,at=backward"
    shot = jobs.run(name, ranks=4 * stages, stages=stages, flags=flags, timeout_s=200.0)
    assert_equal_runs(shot, undisturbed(job), kills=1)
    assert decisions(shot)[-1]["shapes"] == [[1, 1]]
    assert trained(shot) == [[[1, 1]]] or SMALL_CELL in job
    assert {event["target"] for event in shot.named("rank_started")[4 * stages :]} == {2}


@matrix
@pytest.mark.parametrize("cells", [SEQUENCE, CONTEXT, GANG])
def test_a_cell_that_trains_with_fewer_ranks_becomes_whole_again(jobs, undisturbed, name, cells):
    """Rank 3 comes back in the place of rank 5, whose cell is broken, too: rank 2 leaves between two steps, and both
    come back. Whatever was lost, nobody waits for that.
    """
    job = f"{cells} --train-iters 70"
    shot = jobs.run(
        name, ranks=RANKS, stages=STAGES, flags=f"{job} {SPENT} {lost(3, 1)};{lost(4, 14)}", timeout_s=200.0
    )
    assert_equal_runs(shot, undisturbed(job), kills=4)
    (taken,) = shot.named("place_taken")
    assert (taken["target"], taken["spare"]) == (3, 5)
    assert trained(shot) == [[[1, 1]], []]
    leaves = next(event for event in decisions(shot) if "can be whole again" in event["why"])
    assert leaves["planned"]
    begun = {event["generation"]: event["members"] for event in shot.named("generation_started")}
    assert begun[leaves["generation"]] == [0, 1, 6, 7]
    assert begun[max(begun)] == [0, 1, 2, 3, 6, 7]
    dead = [rank for event in shot.named("failure_detected") for rank in event["dead"]]
    assert sorted(dead) == [2, 2, 3, 3, 4, 4, 5, 5], "it has left, and was not lost"


@pytest.mark.parametrize(
    ("cells", "stages", "group"),
    [
        *(
            pytest.param(*one, marks=matrix)
            for one in (
                (SMALL_GANG, 1, 2),
                (GANG, 2, 2),
                (f"{GANG} --hidden-dropout 0.1 --attention-dropout 0.1", 1, 2),
                (f"{GANG} --mtp-num-layers 1", 1, 2),
                (f"{MIXTRAL} --expert-model-parallel-size 2 {CALM} --moe-expert-capacity-factor 1.25", 2, 2),
                (
                    f"{MIXTRAL} --expert-model-parallel-size 2 {CALM} --moe-token-dispatcher-type allgather",
                    1,
                    2,
                ),
                (WIDE_GANGS, 1, 4),
            )
        ),
    ],
)
def test_what_is_left_of_a_gang_has_the_experts_of_those_that_are_lost(
    jobs, undisturbed, name, cells, stages, group
):
    """And computes several microbatches in turn, where each of its ranks computed one."""
    job, ranks = f"{cells} --train-iters 90", 2 * stages * group
    shot = jobs.run(
        name, ranks=ranks, stages=stages, flags=f"{job} {SPENT} {lost(group + 1, 1)}", timeout_s=200.0
    )
    assert_equal_runs(shot, undisturbed(job, ranks=group), kills=2)
    (shrinks,) = shot.named("cell_shrinks")
    assert (shrinks["ranks"], shrinks["whole"]) == ([*range(group, group + group // 2)], group)
    assert trained(shot) == [[[1, group // 2]]]
    for event in shot.named("expert_loads"):
        loads = dict(event["loads"])
        assert loads.keys() == {group // 2, group}
        assert loads[group // 2] == 2.0, "it has all experts, where each of two had half of them"
        assert 1.0 <= loads[group] < 2.0
    assert shot.named("expert_loads")


@matrix
@pytest.mark.parametrize(
    "cells",
    [FOUR, f"{FOUR} --sequence-parallel", BOTH, CONTEXTS, GANGS],
    ids=["tensor", "sequence", "both", "contexts", "gangs"],
)
def test_four_ranks_are_two(jobs, undisturbed, name, cells):
    """Rank 5 is lost, and plays where rank 7 was; rank 6 stands by. As a smaller cell they are lost and come back."""
    job = f"{cells} --train-iters 40"
    inject = f"{lost(5, 1)};rank=4,step=-1,at=backward,incarnation=2"
    shot = jobs.run(name, ranks=8, stages=1, flags=f"{job} {SPENT} {inject}", timeout_s=200.0)
    assert_equal_runs(shot, undisturbed(job, ranks=4), kills=3)
    assert [[1, 2]] in trained(shot)
    assert [event["ranks"] for event in shot.named("cell_shrinks")] == [[4, 5]]


@matrix
@pytest.mark.parametrize(
    "flags",
    [
        "",
        SLICES,
        f"{SLICES} {HASHED}",
        f"--hidden-dropout 0.1 --attention-dropout 0.1 {HASHED}",
        "--moe-token-dispatcher-type allgather",
        "--moe-expert-capacity-factor 1.25",
        "--mtp-num-layers 1",
    ],
)
def test_four_ranks_of_a_gang_are_three(jobs, undisturbed, name, flags):
    """As these do not divide the four microbatches, two of them have none in every other turn."""
    job = f"{UNEVEN} {flags.replace(SLICES, '')} --train-iters 40".replace("  ", " ")
    flags = f"{job} {SLICES if SLICES in flags else ''} {SPENT} {lost(5, 1)}".replace("  ", " ")
    shot = jobs.run(name, ranks=8, stages=1, flags=flags, timeout_s=200.0)
    assert_equal_runs(shot, undisturbed(job, ranks=4), kills=2)
    assert [event["ranks"] for event in shot.named("cell_shrinks")] == [[4, 5, 6]]
    assert trained(shot) == [[[1, 3]]]
    assert not shot.named("left_out")


@matrix
@pytest.mark.parametrize(
    "inject", ["", ";rank=9,step=20,at=backward", ";rank=4,step=20,at=reduce,incarnation=2"]
)
def test_an_uneven_gang_in_a_pipeline_exchanges_lanes_with_whole_ones(jobs, undisturbed, name, inject):
    """And others die beside it, or it does: of the next stage, or its first rank."""
    experts = UNEVEN.replace("--num-experts 8", "--num-experts 6").replace(
        "parallel-size 4", "parallel-size 3"
    )
    job = f"{experts} --train-iters 40 --num-layers 4 --global-batch-size 18"
    flags = f"{job} {SPENT} {lost(4, 1)}{inject}"
    shot = jobs.run(name, ranks=12, stages=2, flags=flags, timeout_s=240.0)
    assert_equal_runs(shot, undisturbed(job, ranks=3), kills=3 if inject else 2)
    assert next(event["ranks"] for event in shot.named("cell_shrinks")) == [3, 4]
    assert [[1, 2]] in trained(shot)


@matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", ["", SLICES], ids=["whole", "slices"])
def test_a_gang_of_three_is_four_again_and_another_one_two(jobs, undisturbed, name, state):
    """Of the third gang one is lost, and one takes the place of that which the second one lacks."""
    job = f"{UNEVEN} --train-iters 90"
    flags = f"{job} {state} {SPENT} {lost(5, 1)};{lost(9, 40)}"
    shot = jobs.run(name, ranks=12, stages=1, flags=flags, timeout_s=500.0)
    assert_equal_runs(shot, undisturbed(job, ranks=4), kills=4)
    assert trained(shot) == [[[1, 3]], [], [[2, 2]]]


@matrix
@pytest.mark.parametrize("cells", [FOUR, CONTEXTS, GANGS], ids=["tensor", "contexts", "gangs"])
def test_half_a_cell_is_a_pipeline_by_itself(jobs, undisturbed, name, cells):
    """Of a new plan, beside the only other worker, which has twice as many microbatches, or about so."""
    job = f"{cells} --train-iters 40"
    flags = f"{job} {SPENT.replace('reroute', 'replan')} {lost(5, 1)}"
    shot = jobs.run(name, ranks=8, stages=1, flags=flags, timeout_s=200.0)
    assert_equal_runs(shot, undisturbed(job, ranks=4), kills=2)
    assert [[1, 2]] in trained(shot)
    routes = decisions(shot)[-1]["layout"]["routes"]
    shares = {one["hops"][0]["worker"]: len(one["microbatches"]) for one in routes}
    assert shares[1] < shares[0]


@matrix
@pytest.mark.parametrize("state", ["", SLICES], ids=["whole", "slices"])
@pytest.mark.parametrize("cells", [BOTH, CONTEXTS, GANGS], ids=["both", "contexts", "gangs"])
def test_four_ranks_are_two_again_and_then_one(jobs, undisturbed, name, cells, state):
    """Ranks of the smaller cell are lost: first rank 6 plays one, which stood by; then there is one left."""
    job = f"{cells} --train-iters 120"
    inject = f"{lost(5, 1)};{ONE_AFTER_THE_OTHER}"
    shot = jobs.run(name, ranks=8, stages=1, flags=f"{job} {state} {SPENT} {inject}".strip(), timeout_s=240.0)
    assert_equal_runs(shot, undisturbed(job, ranks=4), kills=6)
    assert [event["ranks"] for event in shot.named("cell_shrinks")] == [[4, 5], [4, 5], [4]]
    assert trained(shot)[-1] == [[1, 1]]


@matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", ["", SLICES], ids=["whole", "slices"])
def test_a_gang_of_one_rank_is_four_again(jobs, undisturbed, name, state):
    """A third gang breaks, too, and what is left of it are the three ranks that the second one lacks. Whether a
    half and a quarter are of use beside two whole gangs is up to the plan.
    """
    job = f"{GANGS} --train-iters 110"
    inject = f"{lost(5, 1)};{ONE_AFTER_THE_OTHER};{lost(9, 70)}"
    shot = jobs.run(
        name, ranks=12, stages=1, flags=f"{job} {state} {SPENT} {inject}".strip(), timeout_s=500.0
    )
    assert_equal_runs(shot, undisturbed(job, ranks=4), kills=8)
    shapes = [event["shapes"] for event in decisions(shot)]
    assert [one for one, before in zip(shapes, [[], *shapes], strict=False) if one and one != before] == [
        [[1, 2]], [[1, 2]], [[1, 1]]
    ]  # fmt: skip
    begun = {event["generation"]: event["members"] for event in shot.named("generation_started")}
    assert begun[max(begun)] == [*range(8)]
    assert 1 in decisions(shot)[-1]["layout"]["holders"][0]


@matrix
@pytest.mark.parametrize("cells", [SEQUENCE, CONTEXT, GANG], ids=["tensor", "context", "gang"])
@pytest.mark.parametrize(
    "inject",
    [
        "rank=6,step=-1,at=groups,generation=4",
        "rank=2,step=-1,at=groups,incarnation=2",
        "rank=2,step=-1,at=transfer,incarnation=2",
        "rank=2,step=-1,at=reduce,incarnation=2",
        "rank=2,step=-1,at=agreement,incarnation=2",
        "rank=2,step=-1,at=optimizer,incarnation=2",
        "rank=7,step=-1,at=agree,generation=5",
        "rank=7,step=20,at=reduce",
        "rank=0,step=20,at=backward",
        "rank=4,step=20,at=agreement",
        "rank=6,step=20,at=commit",
    ],
)
def test_whoever_dies_beside_a_smaller_cell_or_is_it(jobs, undisturbed, name, cells, inject):
    job = f"{cells} {LONG}"
    shot = jobs.run(
        name, ranks=RANKS, stages=STAGES, flags=f"{job} {SPENT} {lost(3, 1)};{inject}", timeout_s=200.0
    )
    assert_equal_runs(shot, undisturbed(job), kills=3)
    assert trained(shot)


@matrix
@pytest.mark.parametrize("flags", [BFLOAT16, f"{TIED} {HASHED}"])
def test_holders_in_cells_of_unlike_size_have_the_same_bytes(jobs, undisturbed, name, flags):
    """They are compared behind every step; whoever had others would leave."""
    job = f"{SEQUENCE} {LONG} {flags}"
    shot = jobs.run(name, ranks=RANKS, stages=STAGES, flags=f"{job} {SPENT} {lost(3, 1)}", timeout_s=200.0)
    if flags == BFLOAT16:
        assert shot.exit_code == 0, shot.log[-4000:]
        ours, theirs = shot.run.steps, undisturbed(job).run.steps
        assert [one.step for one in ours] == [one.step for one in theirs]
        assert loss_difference(ours, theirs).max_relative <= ROUNDING
        # A norm that leaps, here to five times its neighbours, shows more of what is rounded elsewhere: 2.6e-2. What a
        # sum lacks shows in every step.
        gaps = [norm_difference([one], theirs) for one in ours]
        assert statistics.median(gaps) <= ROUNDING, gaps
        assert_holders_agree(shot)
    else:
        assert_equal_runs(shot, undisturbed(job), kills=2)
    assert trained(shot) == [[[1, 1]]]
    assert not shot.named("left_out")


@matrix
@pytest.mark.parametrize("cells", [CELLS, CONTEXT, GANG])
def test_a_smaller_cell_keeps_optimizer_state_for_whole_ones(jobs, undisturbed, name, cells):
    """Of four replicas two keep the state of a layer; the others are sent its weights."""
    job = f"{cells} {LONG} --global-batch-size 14"
    inject = f"{lost(3, 1)};rank=5,step=20,at=backward"
    shot = jobs.run(
        name,
        ranks=RANKS,
        stages=1,
        flags=f"{job} {SLICES} {SPENT} {inject}".replace("reroute", "auto"),
        timeout_s=200.0,
    )
    assert_equal_runs(shot, undisturbed(job), kills=3)
    assert trained(shot)
