"""Multi-token prediction: its blocks are the head's, and embed with the embedding's weight, wherever the two lie."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import LONG, TOLERANCE, assert_equal_runs, assert_equal_weights, run_case
from tests.e2e.test_exactness import CASES, SHARDED
from tests.e2e.test_rejoin import ONCE, members

pytestmark = pytest.mark.matrix

AHEAD = "--mtp-num-layers 1"
TIED = "--share-embeddings-and-output-weights"
MORE = {
    "two-depths": ((6, 2), "replan", "rank=5,step=1,at=backward;rank=0,step=3,at=reduce", "--mtp-num-layers 2"),
    "dropout": (
        (6, 2), "replan", "rank=5,step=1,at=forward;rank=0,step=3,at=weight_grad",
        f"{AHEAD} --attention-dropout 0.1 --hidden-dropout 0.1",
    ),
    "tied": ((6, 2), "auto", "rank=4,step=2,at=optimizer", f"{AHEAD} {TIED}"),
    "cells": (
        (8, 2), "replan", "rank=0,step=1,at=backward;rank=6,step=3,at=reduce",
        f"{AHEAD} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "ran-ahead": ((4, 4), "auto", "rank=3,step=2,at=backward", f"{AHEAD} --odyssey-redundancy compute"),
    "experts": (
        (6, 2), "replan", "rank=5,step=1,at=backward;rank=1,step=3,at=commit",
        "--mtp-num-layers 2 --num-experts 4 --moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_failures_equals_one_without_further_ahead(jobs, undisturbed, name, case):
    shot = run_case(jobs, name, CASES[case], AHEAD, undisturbed(AHEAD))
    assert shot.run.steps[0].losses.keys() == {"lm loss", "mtp_1 loss"}
    assert shot.named("decision")[0]["layout"]["tied"]


@pytest.mark.parametrize("case", SHARDED)
def test_no_rank_takes_optimizer_state_further_ahead_with_it(jobs, undisturbed, name, case):
    run_case(jobs, name, SHARDED[case], f"{AHEAD} --use-distributed-optimizer", undisturbed(AHEAD))


@pytest.mark.parametrize("case", MORE)
def test_further_ahead_with_other_flags(jobs, undisturbed, name, case):
    *how, more = MORE[case]
    run_case(jobs, name, how, more, undisturbed(more))


@pytest.mark.parametrize("victim", [0, 7])
def test_a_rank_comes_back_further_ahead(jobs, undisturbed, name, victim):
    # At the usual rate some steps have gradients 10 to 50 times as large as others, whose norm loses digits.
    inject, usual = f"rank={victim},step=2,at=backward", f"{AHEAD} {LONG} --lr 5e-4"
    flags = f"{usual} {ONCE} --odyssey-policy replan --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=8, stages=4, flags=flags)
    assert_equal_runs(shot, undisturbed(usual), kills=1)
    assert members(shot)[0] == members(shot)[-1] == 8


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_sequences_come_to_the_whole(jobs, undisturbed, name, size):
    """Tokens further ahead are in other parts. Each part's losses are logged as its own mean, as Megatron has it."""
    parts = f"{AHEAD} --context-parallel-size {size}"
    flags = f"{parts} --odyssey-policy replan --odyssey-inject rank=6,step=2,at=weight_grad"
    shot = jobs.run(name, ranks=8, stages=8 // size // 2, flags=flags)
    whole = undisturbed(AHEAD)
    assert [one.losses["lm loss"] for one in shot.run.steps] == pytest.approx(
        [one.losses["lm loss"] for one in whole.run.steps], rel=TOLERANCE
    )
    assert_equal_weights(shot.weights(), whole.weights())
    assert_equal_runs(shot, undisturbed(parts, ranks=size), kills=1)
