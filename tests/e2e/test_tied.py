"""Embedding and head share a weight: wherever they lie, it is one state, and a run with failures equals one without."""

from __future__ import annotations

import json

import pytest

from tests.e2e.jobs import BFLOAT16, LONG, assert_equal_runs, run_case
from tests.e2e.test_exactness import ALONE, CASES, SHARDED
from tests.e2e.test_rejoin import ONCE, members
from tests.e2e.test_two_speed import STEPS

pytestmark = pytest.mark.matrix

TIED = "--share-embeddings-and-output-weights"
MORE = {
    "redone": (
        (8, 4), "auto", "rank=7,step=2,at=backward;rank=0,step=4,at=weight_grad", "--odyssey-interrupted-step redo",
    ),
    "cells": ((8, 2), "replan", "rank=0,step=1,at=backward;rank=6,step=3,at=reduce", "--tensor-model-parallel-size 2"),
    "sequence-parallel-cells": (
        (8, 2), "auto", "rank=7,step=2,at=weight_grad", "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "ran-ahead": ((4, 4), "auto", "rank=3,step=2,at=backward", "--odyssey-redundancy compute"),
    "on-the-host": (
        (8, 2), "auto", "rank=0,step=1,at=commit;rank=5,step=3,at=param_gather",
        "--use-distributed-optimizer --odyssey-spare-state host",
    ),
    "momentum": ((8, 4), "replan", "rank=7,step=0,at=backward;rank=0,step=3,at=optimizer", "--optimizer sgd --lr 0.3"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tied_a_run_with_failures_equals_one_without(jobs, undisturbed, name, case):
    run_case(jobs, name, CASES[case], TIED, undisturbed(TIED))


@pytest.mark.parametrize("case", SHARDED)
def test_tied_no_rank_takes_optimizer_state_with_it(jobs, undisturbed, name, case):
    shot = run_case(jobs, name, SHARDED[case], f"{TIED} --use-distributed-optimizer", undisturbed(TIED))
    first = shot.named("decision")[0]["layout"]
    assert first["tied"]
    assert len(first["keepers"]) == len(first["holders"]) + 1
    assert first["copies"] == 2


@pytest.mark.parametrize("case", MORE)
def test_tied_with_other_flags(jobs, undisturbed, name, case):
    *how, more = MORE[case]
    same = more if "sgd" in more or "tensor" in more else ""
    run_case(jobs, name, how, f"{TIED} {more}", undisturbed(f"{TIED} {same}".strip()))


@pytest.mark.parametrize("victim", [0, 3, 7])
def test_tied_a_rank_comes_back(jobs, undisturbed, name, victim):
    inject = f"rank={victim},step=2,at=backward"
    shot = jobs.run(
        name,
        ranks=8,
        stages=4,
        flags=f"{TIED} {LONG} {ONCE} --odyssey-policy replan --odyssey-inject {inject}",
    )
    assert_equal_runs(shot, undisturbed(f"{TIED} {LONG}"), kills=1)
    assert members(shot)[0] == members(shot)[-1] == 8


@pytest.mark.parametrize(
    "inject", ["", "rank=2,step=-1,at=forward,generation=3", "rank=0,step=-1,at=commit,generation=3"]
)
def test_tied_layers_behind_the_steps(jobs, undisturbed, tmp_path, name, inject):
    """As ``test_two_speed.py``."""
    known = json.loads((undisturbed(TIED, ranks=8, stages=4).run_dir / "profile.json").read_text())
    known["costs"]["link_bytes_per_s"] = 1e5
    profile = tmp_path / "slow_links.json"
    profile.write_text(json.dumps(known))
    flags = f"{TIED} {STEPS} --odyssey-profile {profile} --odyssey-inject rank=5,step=0,at=backward;{inject}"
    shot = jobs.run(name, ranks=8, stages=4, flags=flags)
    assert_equal_runs(shot, undisturbed(f"{TIED} {STEPS}"), kills=2 if inject else 1)
    assert (3, "fill") in [(event["generation"], event["policy"]) for event in shot.named("decision")]


def test_tied_a_profile_of_another_model_is_refused(jobs, undisturbed, name):
    profile = undisturbed(TIED, ranks=8, stages=4).run_dir / "profile.json"
    run = jobs.run(name, ranks=2, stages=1, flags=f"--odyssey-profile {profile}")
    assert run.exit_code == 2
    assert "Traceback" not in run.log
    assert "6 transformer layers with embedding and head tied, and the job's has 6 with" in run.log


@pytest.mark.parametrize("case", ALONE)
def test_tied_a_shadow_takes_over_without_data_parallelism(jobs, undisturbed, name, case):
    run_case(jobs, name, ALONE[case], f"{TIED} --odyssey-redundancy state", undisturbed(TIED))


def test_tied_in_16_bits(jobs, undisturbed, name):
    flags = f"--use-distributed-optimizer {BFLOAT16} {TIED}"
    run_case(jobs, name, SHARDED["in-a-row"], flags, undisturbed(f"{BFLOAT16} {TIED}"), alike=True)
