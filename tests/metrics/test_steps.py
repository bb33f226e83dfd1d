from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest

from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.steps import check_samples, committed_steps, loss_difference
from odyssey_megatron.metrics.timeline import last_job

from .synthetic_run import FIRST, MICROBATCHES, SECOND, STEP_S, STEPS, SWITCH, loss


@pytest.fixture
def events(runs):
    return copy.deepcopy(last_job(list(read_journal(runs["shot_at"]))))


@pytest.fixture(scope="module")
def undisturbed(runs):
    return committed_steps(last_job(list(read_journal(runs["undisturbed"]))))


def samples_of(events, step, generation):
    return [e for e in events if (e["event"], e["step"], e["generation"]) == ("samples", step, generation)]


def test_each_step_once_in_the_generation_that_committed_it(events):
    steps = committed_steps(events)
    assert [row.step for row in steps] == list(range(STEPS))
    assert {row.generation for row in steps[:FIRST]} == {1}
    assert {row.generation for row in steps[FIRST:SWITCH]} == {2}
    assert {row.generation for row in steps[SWITCH:SECOND]} == {3}
    assert {row.generation for row in steps[SECOND:]} == {6}
    assert steps[3].loss == loss(3)


def test_the_interval_holds_the_aborted_attempt_and_the_recovery(events):
    steps = committed_steps(events)
    assert steps[0].interval_s is None
    assert steps[1].interval_s == pytest.approx(STEP_S, abs=1e-6)
    aborted_s, recovery_s = STEP_S * 5 / MICROBATCHES, 0.012 + 0.004 + 0.100
    assert steps[FIRST].interval_s == pytest.approx(STEP_S + aborted_s + recovery_s, abs=1e-6)
    assert steps[FIRST].step_s == STEP_S


def test_the_loss_difference_is_the_largest_one(events, undisturbed):
    difference = loss_difference(committed_steps(events), undisturbed)
    assert difference.steps == STEPS
    assert difference.max_relative == pytest.approx(2e-13, rel=0.01)
    assert difference.max_absolute == pytest.approx(2e-13 * loss(8), rel=0.01)
    assert loss_difference(undisturbed, undisturbed).max_absolute == 0.0


def test_a_nan_in_one_run_only_is_an_infinite_difference(events, undisturbed):
    for event in events:
        if event["event"] == "step_committed" and event["step"] == 4:
            event["loss"] = {"lm loss": math.nan}
    difference = loss_difference(committed_steps(events), undisturbed)
    assert (difference.max_relative, difference.at_step) == (math.inf, 4)


def test_steps_of_only_one_run_are_named(undisturbed):
    nothing = [replace(undisturbed[0], losses={})]
    assert loss_difference(nothing, nothing).max_absolute == 0.0
    assert loss_difference(nothing, undisturbed).max_absolute == math.inf
    difference = loss_difference(undisturbed[:-2], undisturbed[1:])
    assert (difference.only_here, difference.only_in_reference) == ((0,), (STEPS - 2, STEPS - 1))


def test_samples_are_consumed_exactly_once(events):
    check = check_samples(events, committed_steps(events))
    assert check.ok, check.problems
    assert (check.samples, check.first, check.last) == (STEPS * MICROBATCHES, 0, STEPS * MICROBATCHES - 1)


def test_an_aborted_attempt_does_not_count(events):
    assert samples_of(events, FIRST, 1)
    assert samples_of(events, FIRST, 2)
    for event in samples_of(events, FIRST, 1):
        event["samples"] = [[999] for _ in event["samples"]]
    assert check_samples(events, committed_steps(events)).ok


def test_a_step_that_is_finished_after_the_failure_counts_what_it_used_before(events):
    for event in events:
        if (event["event"], event["step"]) == ("step_committed", SECOND - 1):
            event["generation"] = 6  # agreed on in generation 3, finished in 6
    assert check_samples(events, committed_steps(events)).ok


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda event: event["samples"].__setitem__(0, [7]), "sample 7 stands where 36 should"),
        (lambda event: event["microbatches"].__setitem__(0, event["microbatches"][1]), "used twice"),
        (lambda event: (event["samples"].pop(), event["microbatches"].pop()), "are not 0, 1, 2"),
    ],
)
def test_a_wrong_sample_is_found(events, change, problem):
    change(samples_of(events, 3, 1)[0])
    check = check_samples(events, committed_steps(events))
    assert not check.ok
    assert problem in " ".join(check.problems)


def test_a_skipped_step_is_found(events):
    kept = [e for e in events if e["step"] != 9]
    assert "iterations 10 to 10 were never committed" in check_samples(kept, committed_steps(kept)).problems
