"""A benchmark whose numbers are wrong, or were not measured, misses a bar."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from types import SimpleNamespace

import pytest

from odyssey_megatron.metrics.steps import CommittedStep
from tests.benchmarks import emulated_jobs, overhead, overhead_megatron_lm, planner, shapes, slow_emulated
from tests.benchmarks.bars import largest_difference, norm_difference

NAN, INF = math.nan, math.inf
RIGHT = [5.0, 4.0, 3.0]
WRONG = ([5.0, NAN, 3.0], [5.0, 4.001, 3.0], [5.0, INF, 3.0])


def steps_of(norms, intervals_s=(None, 1.0, 1.0)):
    return [
        CommittedStep(
            step=number, generation=1, losses={"lm loss": 1.0, "modelled_s": 1.0}, grad_norm=norm, step_s=1.0,
            interval_s=interval_s, committed_wall_s=float(number),
        )
        for number, (norm, interval_s) in enumerate(zip(norms, intervals_s, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs", "gap"),
    [
        ([2.0, 3.0], [2.0, 2.0], 0.5),
        ([0.0], [0.0], 0.0),
        ([1.0, NAN], [1.0, 1.0], INF),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([NAN], [NAN], INF),
        ([INF], [INF], INF),
        ([None], [None], INF),
        ([1.0], [1.0, 1.0], INF),
        ([], [], INF),
    ],
)
def test_what_is_not_known_to_be_the_same_differs(ours, theirs, gap):
    assert largest_difference(ours, theirs) == gap


def test_norms_are_compared_step_by_step():
    known = steps_of(RIGHT)
    assert norm_difference(known[1:], known) == 0.0
    assert norm_difference(known, known[1:]) == INF
    assert norm_difference(steps_of([5.0, 4.0, None]), known) == INF
    for wrong in WRONG:
        assert norm_difference(steps_of(wrong), known) > 1e-5


def wrong_in(losses, norms):
    """A job of ours, and Megatron's beside it."""
    ours, theirs = (
        overhead.Trained([0.0, 1.0, 2.0], losses, norms),
        overhead.Trained([0.0, 1.0, 2.0], RIGHT, RIGHT),
    )
    return lambda *how: ours, lambda *how: theirs


CASES = [(RIGHT, RIGHT, 0), *((wrong, RIGHT, 1) for wrong in WRONG), *((RIGHT, wrong, 1) for wrong in WRONG)]


@pytest.mark.parametrize(("losses", "norms", "code"), CASES)
def test_a_fast_wrong_step_is_no_step(monkeypatch, losses, norms, code):
    """Beside Megatron-Core."""
    ours, theirs = wrong_in(losses, norms)
    monkeypatch.setattr(overhead, "odyssey", ours)
    monkeypatch.setattr(overhead, "stock", theirs)
    monkeypatch.setattr(sys, "argv", ["overhead.py", "--rounds", "2"])
    assert overhead.main() == code


@pytest.mark.parametrize("in_float64", [False, True])
@pytest.mark.parametrize(("losses", "norms", "code"), CASES)
def test_a_fast_wrong_step_with_slices_is_no_step(monkeypatch, losses, norms, code, in_float64):
    """Wrong in one of the two precisions."""
    wrong, _ = wrong_in(losses, norms)
    right, _ = wrong_in(RIGHT, RIGHT)

    def ours(steps, folder, more):
        return wrong() if ("--odyssey-float64 on" in more) == in_float64 else right()

    def stock(steps, folder, more):
        (folder / "stock.json").write_text(json.dumps({"optimizer_bytes": 1}))
        return right()

    monkeypatch.setattr(overhead, "odyssey", ours)
    monkeypatch.setattr(overhead, "stock", stock)
    monkeypatch.setattr(shapes, "read_journal", lambda _: [{"event": "weights", "optimizer_bytes": 1}])
    cut = shapes.slices_measured("", 2, 3)
    missed = [one.name for one in shapes.of_slices("x", cut) if not one.ok]
    assert bool(missed) == bool(code)
    assert all("difference" in one for one in missed)
    assert all(("(float64)" in one) == in_float64 for one in missed)


@pytest.mark.parametrize(("losses", "norms", "code"), CASES)
def test_a_fast_wrong_iteration_is_none(monkeypatch, losses, norms, code):
    """Beside Megatron-LM."""

    def train(checkout, steps, folder, *, odyssey):
        numbers = (losses, norms) if odyssey else (RIGHT, RIGHT)
        return [overhead_megatron_lm.Printed(1.0, *one) for one in zip(*numbers, strict=True)]

    monkeypatch.setenv("MEGATRON_LM_PATH", "a checkout")
    monkeypatch.setattr(overhead_megatron_lm, "train", train)
    monkeypatch.setattr(sys, "argv", ["overhead_megatron_lm.py", "--rounds", "2"])
    # Its norms have three digits.
    assert overhead_megatron_lm.main() == (0 if norms is WRONG[1] else code)


def test_a_step_that_was_not_timed_is_not_one_of_no_time():
    def row(intervals_s):
        change = SimpleNamespace(step=3, stall_s=0.1, policy="replan")
        steps = steps_of([1.0] * 6, intervals_s)
        return slow_emulated._row("a job", SimpleNamespace(steps=steps, switches=[change]), 0)

    assert row([None, 2.0, 2.0, 1.0, 1.0, 1.0])["seconds_until_mended"] == 4.0
    with pytest.raises(RuntimeError, match="a job: step 1 was not measured"):
        row([None, None, 2.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(("measured_at_s", "is_right"), [(None, False), (5.0, False), (3.0, True)])
def test_a_recovery_by_an_estimate_is_none_by_measurements(tmp_path, monkeypatch, measured_at_s, is_right):
    """Of an emulated job, whose worker dies at 4 s."""
    journal = {
        "decision": [{"t_s": 0.0}, {"t_s": 4.0}],
        "measured": [{"t_s": measured_at_s}] if measured_at_s is not None else [],
    }
    monkeypatch.setattr(emulated_jobs, "events", lambda _, name: journal[name])
    told, _ = emulated_jobs.emulation(
        emulated_jobs.layer(1.0), emulated_jobs.layer(0.0), stages=2, microbatches=4, steps=1
    )
    told.profile.save(tmp_path / "profile.json")
    if is_right:
        assert emulated_jobs.measured_costs(tmp_path) == told.profile.costs
        return
    with pytest.raises(RuntimeError, match="before the planner knew what layers take"):
        emulated_jobs.measured_costs(tmp_path)


def test_the_planner_of_an_emulated_job_is_not_told_what_layers_take():
    told, truth = emulated_jobs.emulation(
        emulated_jobs.layer(1.0), emulated_jobs.layer(0.0), stages=4, microbatches=4, steps=1
    )
    assert {one.forward_s for one in told.profile.costs.layers[1:-1]} == {0.5}
    times = [one.forward_s for one in truth.costs.layers[1:-1]]
    assert len(set(times)) == 8
    assert all(0.9 <= one <= 1.1 for one in times)
    assert truth.costs.layers[-1].forward_s == 2.0, "as much as a middle stage"
    assert "truth" not in {field.name for field in dataclasses.fields(told)}


USUAL = {
    "decision_ms": 10.0, "rank_bytes": 1000, "rank_ms": 2.0, "rest_bytes": 1000, "rest_ms": 2.0, "coordinator_mb": 300,
    "unsteady": 1.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "bar"),
    [
        ("rest_bytes", 65537, "rest_bytes"),
        ("rest_ms", 20.1, "rest_ms"),
        ("decision_ms", 21.0, "decision_ms"),
        ("rank_bytes", 65537, "rank_bytes"),
        ("rank_ms", 20.1, "rank_ms"),
        ("coordinator_mb", 351, "coordinator_mb"),
        ("unsteady", 1.26, "steady"),
    ],
)
def test_every_repeat_of_an_incident_is_judged(key, value, bar):
    """Whatever is too much, in whichever repeat: that with the longest decision is the last one here."""
    several = [USUAL, USUAL | {key: value}, USUAL | {"decision_ms": 20.0}]
    missed = [one.name for one in planner.judged("x", planner.worst(several), 20.0, 350) if not one.ok]
    assert missed == [f"x_{bar}"]
    usual = planner.judged("x", planner.worst([USUAL] * 3), 20.0, 350)
    assert len(usual) == 7
    assert all(one.ok for one in usual)
