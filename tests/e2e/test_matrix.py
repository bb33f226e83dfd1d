"""Every point of a step and every phase of a recovery x every kind of victim x every way to keep state x every policy.

    bash tests/run.sh tests/e2e/test_matrix.py -m matrix        # all of it, an hour on two cores

The suite runs a representative part of this: ``test_exactness.py``, ``test_tensor_parallel.py``. Evaluations and
checkpoints are in ``tests/megatron_lm``, since they need Megatron-LM's own loop.
"""

from __future__ import annotations

import itertools

import pytest

from odyssey_megatron.config import policies
from odyssey_megatron.faults import RECOVERY_POINTS, STEP_POINTS
from odyssey_megatron.recover import Phase
from tests.e2e.jobs import BFLOAT16, assert_alike_runs, assert_equal_runs
from tests.e2e.test_experts import DEEPSEEK, MIXTRAL

pytestmark = pytest.mark.matrix

POINTS = (*STEP_POINTS, *RECOVERY_POINTS)
POLICIES = policies()
PP4_DP2 = {"first": (1,), "middle": (4,), "last": (6,), "rank0": (0,), "two": (3, 6)}
PP2_DP4 = {"first": (1,), "last": (6,), "rank0": (0,), "two": (2, 5)}
PP4 = {"middle": (2,), "last": (3,), "rank0": (0,)}
SHARDED = "--tensor-model-parallel-size 2 --sequence-parallel --num-layers 4 --global-batch-size 6"
CELLS = {"first": (3,), "last": (6,), "rank0": (0,), "cell": (4, 5), "two": (2, 7)}
CELLS_OF_FOUR = {"first": (6,), "last": (12,), "rank0": (0,), "cell": (8, 11), "two": (3, 14)}
THREE_OWNERS = PP2_DP4 | {"middle": (4,), "two": (1, 2), "two-and-one": (4, 6, 3)}
"""Any two of a stage may be lost at once."""
GANGS = f"{MIXTRAL} --expert-model-parallel-size 2 --num-layers 4"
GANGS_OF_FOUR = f"{DEEPSEEK} --expert-model-parallel-size 4 --num-layers 4"
PP2_OF_GANGS = {"first": (1,), "last": (3,), "rank0": (0,), "cell": (2, 3)}
PP2_OF_GANGS_OF_FOUR = {"first": (2,), "last": (7,), "rank0": (0,), "cell": (4, 6)}
STATES = {
    # ranks, stages, victims, flags of the model, flags of how it is kept
    "replicated": (8, 4, PP4_DP2, "", ""),
    "distributed-optimizer": (8, 2, PP2_DP4, "", "--use-distributed-optimizer"),
    "bf16-distributed-optimizer": (
        8,
        2,
        PP2_DP4,
        "",
        f"--use-distributed-optimizer {BFLOAT16}",
    ),
    "tensor-parallel": (8, 2, CELLS, SHARDED, ""),
    "context-parallel": (8, 2, CELLS, "--context-parallel-size 2 --num-layers 4 --global-batch-size 6", ""),
    "context-parallel-distributed-optimizer": (
        8,
        1,
        CELLS,
        "--context-parallel-size 2 --num-layers 4 --global-batch-size 6",
        "--use-distributed-optimizer",
    ),
    "context-and-tensor-parallel": (16, 2, CELLS_OF_FOUR, SHARDED, "--context-parallel-size 2"),
    "three-owners-distributed-optimizer": (
        8,
        2,
        THREE_OWNERS,
        "",
        "--use-distributed-optimizer --odyssey-redundancy-level 2",
    ),
    "gangs": (8, 2, CELLS, GANGS, ""),
    "gangs-distributed-optimizer": (8, 1, CELLS, GANGS, "--use-distributed-optimizer"),
    "gangs-of-four": (16, 2, CELLS_OF_FOUR, GANGS_OF_FOUR, ""),
    "gangs-shadows": (4, 2, PP2_OF_GANGS, GANGS, "--odyssey-redundancy state"),
    "gangs-of-four-shadows": (8, 2, PP2_OF_GANGS_OF_FOUR, GANGS_OF_FOUR, "--odyssey-redundancy state"),
    "shadows": (4, 4, PP4, "", "--odyssey-redundancy state"),
    "shadows-run-ahead": (4, 4, PP4, "", "--odyssey-redundancy compute"),
}
IN_RECOVERY = tuple(phase.value for phase in Phase if phase is not Phase.TRAIN)


def happens(state: str, point: str, policy: str) -> bool:
    """Whether the fault can come about, and be survived: one pipeline with one shadow a layer loses one worker."""
    if point == "param_gather":
        return "optimizer" in state
    if point in IN_RECOVERY:
        moves = point != "transfer" or policy == "replan"  # nothing else moves layers
        return "shadows" not in state and moves
    return True


CASES = {
    f"{state}-{point}-{victim}-{policy}": (state, point, victim, policy)
    for state, (_, _, victims, _, _) in STATES.items()
    for point, victim, policy in itertools.product(POINTS, victims, POLICIES)
    if happens(state, point, policy)
}


def faults(point: str, victims: tuple[int, ...], ranks: int) -> str:
    """``point`` hits each of ``victims``; in a recovery, a rank of another stage hit first."""
    if point not in IN_RECOVERY:
        return ";".join(f"rank={rank},step=2,at={point}" for rank in victims)
    other = (victims[0] + ranks // 2) % ranks
    generation = 1 if point == Phase.ABORT.value else 2  # that phase ends the one before
    return f"rank={other},step=2,at=backward;rank={victims[0]},step=2,at={point},generation={generation}"


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_failures_equals_one_without(jobs, undisturbed, name, case):
    state, point, victim, policy = CASES[case]
    ranks, stages, victims, model, flags = STATES[state]
    inject = faults(point, victims[victim], ranks)
    shot = jobs.run(
        name,
        ranks=ranks,
        stages=stages,
        flags=f"{model} {flags} --odyssey-hang-s 5 --odyssey-policy {policy} --odyssey-inject {inject}",
    )
    if point == "transfer" and shot.exit_code == 0 and len(shot.named("injected")) == 1:
        pytest.skip("this plan moves no layer to or from the second rank")
    kills = inject.count("rank=")
    if victim == "cell" and len(shot.named("injected")) == 1:
        kills = 1  # the other rank of the cell was fenced before it came to the point
    check = assert_alike_runs if BFLOAT16 in flags else assert_equal_runs
    alone = undisturbed(BFLOAT16 if BFLOAT16 in flags else model, ranks=4 if model == GANGS_OF_FOUR else 2)
    check(shot, alone, kills=kills)
