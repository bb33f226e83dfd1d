"""Who is slow, and why: simulated jobs of known causes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from odyssey_megatron.diagnosis.change import raised
from odyssey_megatron.diagnosis.timings import TimedWork, Timing, Timings
from odyssey_megatron.diagnosis.verdicts import diagnose
from tests.diagnosis.simulated import Simulated, until

ALWAYS = 10**9


def kinds(job: Simulated) -> list[str]:
    return [one.kind for one in diagnose(job.timings()).verdicts]


@pytest.mark.parametrize("tokens", [8192, 16384, 32768])
def test_nobody_is_slow(tokens):
    assert kinds(Simulated(tokens=tokens)) == []


@pytest.mark.parametrize("tokens", [8192, 32768])
@pytest.mark.parametrize("factor", [1.1, 1.5, 3.0])
def test_the_slow_worker_and_its_factor_within_three_steps(tokens, factor):
    timings = Simulated(tokens=tokens, slow={6: (factor, 10, ALWAYS)}).timings()
    assert diagnose(until(timings, 9)).slow == {}
    found = diagnose(until(timings, 12))
    assert found.slow == {6: pytest.approx(1 / factor, rel=0.02)}
    (verdict,) = found.verdicts
    assert (verdict.since, verdict.found) == (10, 12)
    assert "since step 10" in verdict.evidence


def test_slow_from_the_first_step_on_beside_one_peer():
    job = Simulated(replicas=2, stages=2, slow={3: (1.3, 0, ALWAYS)})
    assert diagnose(job.timings()).slow == {3: pytest.approx(1 / 1.3, rel=0.02)}


@pytest.mark.parametrize(
    ("kind", "factor"), [("forward", 4.0), ("input gradient", 2.0), ("weight gradient", 4.0)]
)
def test_slow_in_one_kind_of_its_work_alone(kind, factor):
    """As where samples come late: its forwards take longer, and so do steps."""
    rng = np.random.default_rng(0)
    costs = {"forward": 1.0, "input gradient": 1.2, "weight gradient": 0.8}
    rows = [
        Timing(
            step,
            worker,
            TimedWork(worker % 2, worker % 2 + 1, one),
            cost * rng.normal(1.0, 0.01) * (factor if (worker, one) == (3, kind) and step >= 8 else 1.0),
        )
        for step in range(14)
        for worker in range(8)
        for one, cost in costs.items()
    ]
    longer = 1 + (factor - 1) * costs[kind] / 3
    assert diagnose(Timings.of(rows)).slow == {3: pytest.approx(1 / longer, rel=0.03)}


def test_two_slow_workers_of_one_stage():
    found = diagnose(Simulated(slow={1: (1.5, 5, ALWAYS), 9: (2.0, 8, ALWAYS)}).timings())
    assert found.slow == {1: pytest.approx(1 / 1.5, rel=0.02), 9: pytest.approx(1 / 2, rel=0.02)}


def test_one_who_has_recovered_is_not_slow():
    timings = Simulated(slow={6: (1.5, 5, 12)}).timings()
    assert diagnose(until(timings, 11)).slow.keys() == {6}
    assert diagnose(until(timings, 15)).verdicts == ()


def test_without_peers_a_worker_is_compared_with_itself():
    found = diagnose(Simulated(replicas=1, slow={2: (1.4, 14, ALWAYS)}).timings())
    assert found.slow == {2: pytest.approx(1 / 1.4, rel=0.03)}


def test_without_peers_its_layers_cost_what_they_did_before():
    timings = Simulated(replicas=1, slow={2: (1.4, 6, ALWAYS)}).timings()
    before = diagnose(until(timings, 5))
    assert diagnose(timings).slow.get(2, 1.0) > 0.8, (
        "slow for most of the window, and nobody else has its layers"
    )
    assert diagnose(timings, before.costs).slow == {2: pytest.approx(1 / 1.4, rel=0.03)}


def test_layers_of_a_slow_worker_do_not_look_dear():
    healthy = diagnose(Simulated().timings()).costs
    beside = diagnose(Simulated(slow={6: (3.0, 10, ALWAYS)}).timings()).costs
    for piece, (alpha, _) in healthy.items():
        assert beside[piece][0] == pytest.approx(alpha, rel=0.01)


def test_a_dear_stage_is_not_a_slow_worker():
    (verdict,) = diagnose(Simulated(dear={3: 1.6}).timings()).verdicts
    assert (verdict.kind, verdict.layers) == ("uneven stage", (3, 4))
    assert verdict.factor == pytest.approx(1.6, rel=0.02)
    assert kinds(Simulated(dear={3: 1.6}, slow={1: (1.5, 5, ALWAYS)})) == ["slow worker", "uneven stage"]


def test_a_stage_that_is_longer_as_the_other_one_s_worker_is_slow_is_not_dear():
    """As where layers have been moved off it."""
    known = diagnose(Simulated(replicas=1, stages=2, dear={0: 3.0}).timings()).costs
    found = diagnose(
        Simulated(replicas=1, stages=2, dear={0: 3.0}, slow={1: (3.0, 0, ALWAYS)}).timings(), known
    )
    assert found.slow == {1: pytest.approx(1 / 3, rel=0.03)}
    assert [one.kind for one in found.verdicts] == ["slow worker"]


def test_everybody_slower():
    (verdict,) = diagnose(Simulated(everybody=(1.2, 15)).timings()).verdicts
    assert (verdict.kind, verdict.since) == ("all slower", 15)
    assert verdict.factor == pytest.approx(1.2, rel=0.02)


def test_sequences_that_differ_are_nobodys_fault():
    job = Simulated(tokens=32768, replicas=8, lengths_known=False, steps=40)
    assert kinds(job) == ["uneven sequences"]


def test_sequences_whose_lengths_are_known_are_explained():
    assert kinds(Simulated(tokens=32768, replicas=8, steps=40)) == []


def test_one_bad_step_is_nothing():
    assert kinds(Simulated(slow={6: (5.0, 10, 11)})) == []
    assert kinds(Simulated(slow={6: (5.0, 10, 12)})) == []


def test_two_steps_say_nothing():
    assert diagnose(until(Simulated(slow={6: (5.0, 0, ALWAYS)}).timings(), 1)).verdicts == ()
    assert diagnose(Timings.of([])).verdicts == ()


def test_a_worker_that_was_away():
    rows = [
        Timing(step, worker, TimedWork(0, 1, "forward"), 2.0 if worker == 1 else 1.0)
        for step in range(12)
        for worker in range(3)
        if worker != 1 or step >= 6
    ]
    (verdict,) = diagnose(Timings.of(rows)).verdicts
    assert (verdict.worker, verdict.since) == (1, 6)


def test_a_level_that_comes_and_goes():
    up = np.full(5, math.log(1.3))
    down = np.zeros(5)
    assert raised(np.concatenate([down, up]), 0.01).since == 5
    assert raised(np.concatenate([down, up, down]), 0.01) is None
    again = raised(np.concatenate([down, up, down, up]), 0.01)
    assert (again.since, again.found) == (15, 17)
