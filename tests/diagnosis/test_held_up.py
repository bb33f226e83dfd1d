"""Workers that do not get their processor, told apart from a busy machine and from those who share a core."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey_megatron.diagnosis.held_up import HeldUp, with_held_up
from odyssey_megatron.diagnosis.verdicts import Diagnosis, Verdict

STEPS, WORKERS = 40, 8
NOTHING = Diagnosis(costs={})


def machine(seed=0, steps=STEPS, noise=0.2, busy=lambda step: 1.0, robbed=lambda step: 1.0):
    """Workers that share cores, some always more than others; worker 3 is ``robbed``."""
    rng = np.random.default_rng(seed)
    shares = 1 + rng.uniform(0, 1.0, WORKERS)
    for step in range(steps):
        for worker in range(WORKERS):
            wall = (
                shares[worker] * busy(step) * rng.lognormal(0, noise) * (robbed(step) if worker == 3 else 1)
            )
            yield HeldUp(step, worker, 0.1, 0.1 * max(1.0, wall))


def found(rows, slow=()):
    return {one.worker: one for one in with_held_up(NOTHING, rows, slow).verdicts if one.worker >= 0}


@pytest.mark.parametrize("seed", range(20))
def test_who_loses_70_percent_is_found_and_by_how_much(seed):
    verdicts = found(machine(seed, robbed=lambda step: 3.3 if step >= 20 else 1.0))
    assert set(verdicts) == {3}
    assert verdicts[3].factor == pytest.approx(3.3, rel=0.4)
    assert 18 <= verdicts[3].since <= 22
    assert "does not get its processor" in verdicts[3].evidence


def test_within_three_measured_steps_where_the_machine_is_quiet():
    verdicts = found(machine(noise=0.02, steps=23, robbed=lambda step: 3.3 if step >= 20 else 1.0))
    assert verdicts[3].found <= 22


@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
def test_nobody_is_where_all_share_a_machine(noise):
    for seed in range(50):
        assert found(machine(seed, noise=noise)) == {}


def test_a_busy_machine_is_nobodys_fault():
    rows = list(machine(noise=0.1, busy=lambda step: 3.0 if step >= 20 else 1.0))
    (verdict,) = with_held_up(NOTHING, rows, ()).verdicts
    assert verdict.kind == "all slower"
    assert verdict.factor == pytest.approx(3.0, rel=0.3)


def test_it_is_over_when_it_gets_its_processor_back():
    rows = list(machine(robbed=lambda step: 3.3 if 10 <= step < 25 else 1.0))
    assert set(found([one for one in rows if one.step < 25])) == {3}
    assert found(rows, slow={3}) == {}


def test_one_that_is_known_stays_so_when_the_window_has_nothing_from_before():
    rows = list(machine(noise=0.1, robbed=lambda step: 3.3))
    assert found(rows) == {}, "by these steps alone it may always have been so"
    assert set(found(rows, slow={3})) == {3}


def test_slow_by_both_clocks_is_slow_by_both_together():
    other = Verdict(kind="slow worker", worker=3, factor=2.0, since=5, found=8, evidence="takes longer")
    before = Diagnosis(costs={}, verdicts=(other,), factors={3: 2.0}, latest={3: 2.0})
    rows = list(machine(noise=0.05, robbed=lambda step: 3.0 if step >= 20 else 1.0))
    diagnosis = with_held_up(before, rows, ())
    (verdict,) = diagnosis.verdicts
    assert verdict.factor == pytest.approx(6.0, rel=0.2)
    assert verdict.evidence.startswith("takes longer; computes for 1/")
    assert diagnosis.slow == {3: pytest.approx(1 / 6, rel=0.2)}
    assert diagnosis.latest[3] > 3


def test_few_steps_or_one_worker_say_nothing():
    rows = list(machine(robbed=lambda step: 9.0))
    assert with_held_up(NOTHING, [one for one in rows if one.step < 2], ()) is NOTHING
    assert with_held_up(NOTHING, [one for one in rows if one.worker == 3], ()) is NOTHING
