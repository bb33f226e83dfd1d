"""Evaluations and checkpoints x every kind of victim x every way to keep state x every policy; the steps themselves are
in ``tests/e2e/test_matrix.py``.

    MEGATRON_LM_PATH=... bash tests/run.sh -m matrix tests/megatron_lm          # half an hour on two cores
"""

from __future__ import annotations

import itertools

import pytest

from tests.e2e.jobs import assert_equal_numbers, assert_holders_agree
from tests.e2e.test_matrix import CELLS, POLICIES, PP2_DP4
from tests.megatron_lm.jobs import FLOAT64, MOCK, assert_equal_checkpoints

pytestmark = pytest.mark.matrix

RANKS, STAGES = 8, 2
POINTS = ("evaluate", "checkpoint")
STATES = {
    # flags, victims
    "replicated": ("", PP2_DP4),
    "distributed-optimizer": ("--use-distributed-optimizer", PP2_DP4),
    "tensor-parallel": ("--tensor-model-parallel-size 2 --sequence-parallel", CELLS),
}
CASES = {
    f"{state}-{point}-{victim}-{policy}": (state, point, victim, policy)
    for state, (_, victims) in STATES.items()
    for point, victim, policy in itertools.product(POINTS, victims, POLICIES)
}


@pytest.fixture(scope="module")
def undisturbed(jobs):
    """State -> that job without failures, and the folder of its checkpoints; run once."""
    known = {}

    def run(state):
        if state not in known:
            known[state] = train(jobs, f"undisturbed-{state}", state)
        return known[state]

    return run


def train(jobs, name, state, more="", inject=""):
    saved = jobs.folder / f"{name}-saved"
    flags = f"{MOCK} {STATES[state][0]} --odyssey-float64 on --save {saved} --save-interval 3 {more}"
    run = jobs.odyssey(name, flags, ranks=RANKS, stages=STAGES, inject=inject)
    assert run.exit_code == 0, run.log[-4000:]
    return run, saved


@pytest.mark.parametrize("case", CASES)
def test_what_is_done_together_equals_that_of_a_run_without_failures(jobs, undisturbed, name, case):
    state, point, victim, policy = CASES[case]
    killed = STATES[state][1][victim]
    inject = ";".join(f"rank={rank},step=3,at={point}" for rank in killed)
    shot, saved = train(jobs, name, state, f"--odyssey-hang-s 5 --odyssey-policy {policy}", inject)
    reference, expected = undisturbed(state)
    assert set(killed) <= set(shot.killed)
    assert_equal_numbers(shot.run.steps, reference.run.steps, rel=FLOAT64)
    assert shot.evaluations == reference.evaluations
    assert_holders_agree(shot)
    for iteration in (3, 6):
        assert_equal_checkpoints(saved, expected, iteration)
