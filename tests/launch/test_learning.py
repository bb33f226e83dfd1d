"""What ranks measure reaches the planner while nobody waits for it. The planner is the test's; the rest is real."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.state import SlowSums, initial_state
from odyssey_megatron.launch.coordinator.learning import Learning
from tests.launch.played import PLAN, Job

SEEN = tuple(f"seen by {rank}" for rank in range(4))


@pytest.fixture
def started(tmp_path):
    job = Job(tmp_path)
    job.post()
    job.generation(1)
    job.live(1, 0, 1, 2, 3)
    yield job
    job.close()


def test_before_anybody_dies(started):
    assert started.absent(2)
    assert started.planner.learned[0] == (PLAN, SEEN)


def test_what_was_measured_counts_from_the_first_decision_on(tmp_path):
    job = Job(tmp_path)
    job.planner.learn = lambda *args: time.sleep(60)
    job.post()
    job.generation(1)
    job.live(1, 0, 1, 2, 3)
    job.died(2)
    job.generation(2)
    assert job.planner.adopted == [SEEN]
    job.close()


def test_at_once_for_what_trains_now(started):
    started.died(2)
    second = started.generation(2)
    started.live(2, 0, 1, 3)
    assert started.absent(3)
    current, seen = started.planner.learned[-1]
    assert (current.step_s, seen) == (second.plan.step_s, SEEN)


def test_who_is_slow_is_known_while_decisions_are_worked_out(started):
    begun = threading.Event()

    def takes_long(*args):
        begun.set()
        time.sleep(60)

    started.planner.rehearse = takes_long
    started.died(2)
    started.generation(2)
    started.live(2, 0, 1, 3)
    assert begun.wait(10)
    known = len(started.planner.learned)
    deadline_s = time.monotonic() + 20
    while len(started.planner.learned) < known + 2 and time.monotonic() < deadline_s:
        started.absent(3)
    assert len(started.planner.learned) >= known + 2


def test_decisions_are_worked_out_anew_once_costs_are_measured(tmp_path):
    job, ended = Job(tmp_path), []

    def takes_a_second(*args):
        """After which it is due again in twenty."""
        knows, began_s = bool(job.planner.adopted), time.thread_time()
        while time.thread_time() < began_s + 1:
            pass
        ended.append(knows)

    job.planner.rehearse = takes_a_second
    job.post(measured=False)
    job.generation(1)
    job.live(1, 0, 1, 2, 3)
    for known, text in ((False, "seen by {}"), (True, "seen again by {}")):
        deadline_s = time.monotonic() + 10
        while known not in ended and time.monotonic() < deadline_s:
            time.sleep(0.05)
        job.publish(text)
    assert ended == [False, True]
    job.close()


@pytest.mark.parametrize(
    "slow", [{"slow_links": ((0, 1, 0.5),)}, {"slow_sums": (SlowSums((0, 2), True, 2.0),)}]
)
def test_decisions_are_worked_out_anew_once_links_are_slow(slow):
    rehearsed = []

    class Planner:
        def learn(self, *args):
            pass

        keep = learn

        def rehearse(self, state, *args):
            """After which it is due again in six seconds."""
            rehearsed.append(state)
            began_s = time.thread_time()
            while time.thread_time() < began_s + 0.3:
                pass

    learning, before = Learning(Planner(), None, 0), initial_state(nodes=(0, 0, 1, 1))
    for state in (before, replace(before, **slow)):
        deadline_s = time.monotonic() + 5
        while state not in rehearsed and time.monotonic() < deadline_s:
            learning.look(state, PLAN)
            time.sleep(0.05)
    learning.close()
    assert rehearsed == [before, replace(before, **slow)]


def test_what_goes_wrong_in_it_costs_the_job_nothing(started, caplog):
    def broken(*args):
        raise ZeroDivisionError("no rate")

    started.planner.learn = broken
    started.died(2)
    second = started.generation(2)
    started.live(2, 0, 1, 3)
    assert started.absent(3)
    assert "no rate" in caplog.text
    started.died(1)
    started.generation(3)
    assert started.planner.previous[-1].step_s == second.plan.step_s
