"""Megatron's checkpoints, saved under any layout, load under any other: with the plugin and without."""

from __future__ import annotations

import pytest

from tests.megatron_lm.jobs import FLOAT32, MOCK, assert_same_lines


@pytest.fixture(scope="session")
def saved_ragged(jobs):
    """A checkpoint of iteration 3, by three survivors of six ranks that hold three pipelines of two stages."""
    folder = jobs.folder / "saved-ragged"
    flags = f"{MOCK} --save {folder} --save-interval 3 --exit-interval 3 --odyssey-policy replan"
    run = jobs.odyssey(
        "save-ragged", flags, ranks=6, stages=2,
        inject="rank=0,step=0,at=backward;rank=4,step=1,at=forward;rank=5,step=3,at=checkpoint",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-4000:]
    assert run.killed == [0, 4, 5]
    return folder


@pytest.fixture(scope="session")
def saved_plain(jobs):
    """The same iteration's, by plain Megatron-LM."""
    folder = jobs.folder / "saved-plain"
    jobs.plain(f"{MOCK} --save {folder} --save-interval 3 --exit-interval 3", ranks=6, stages=2)
    return folder


@pytest.fixture(scope="session")
def resumed(jobs, saved_plain):
    """Plain Megatron-LM from its own checkpoint on.

    Its second line tells the mean of two iterations, so it is this that others are compared with.
    """
    run, whole = jobs.plain(f"{MOCK} --load {saved_plain}", ranks=6, stages=2), jobs.plain(ranks=6, stages=2)
    for ours, theirs in ((run.iterations[0], whole.iterations[3]), (run.iterations[2], whole.iterations[5])):
        assert ours.loss == pytest.approx(theirs.loss, rel=FLOAT32)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=FLOAT32, abs=1.1e-3)
    return run


def test_saved_ragged_loads_into_plain_megatron_lm(jobs, saved_ragged, resumed):
    run = jobs.plain(f"{MOCK} --load {saved_ragged}", ranks=2, stages=2)
    assert_same_lines(run, resumed, first=4)


def test_saved_ragged_loads_into_another_layout(jobs, name, saved_ragged, resumed):
    run = jobs.odyssey(name, f"{MOCK} --load {saved_ragged}", ranks=4, stages=4)
    assert_same_lines(run, resumed, first=4)


def test_saved_plain_loads_and_survives(jobs, name, saved_plain, resumed):
    run = jobs.odyssey(
        name, f"{MOCK} --load {saved_plain}", ranks=4, stages=2, inject="rank=1,step=4,at=backward"
    )
    assert_same_lines(run, resumed, first=4)
    assert run.killed == [1]
