"""A node that is asked to leave may do so if the others can go on without it. Otherwise the job is to end."""

from __future__ import annotations

import pytest

from odyssey_megatron.cluster.events import NodeLeaves
from odyssey_megatron.errors import EXIT_AS_ASKED, LayersLost, PlanInfeasible
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.verdict import after_training
from tests.launch.played import Job


@pytest.fixture
def job(tmp_path):
    """Ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1."""
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.fixture
def live(job):
    job.post()
    job.generation(1)
    job.live(1, 0, 1, 2, 3)
    return job


def needed(job: Job, node: int) -> str:
    """Why ``node`` cannot leave."""
    job.send(NodeLeaves(node=node))
    return job.control.get(keys.may_leave_key(node), timeout_s=5)


def test_who_is_not_needed_may_leave_and_the_last_ones_may_not(live):
    assert needed(live, 1) == ""
    assert needed(live, 0) == "no rank would be left", "the ranks of node 1 still finish their step"
    assert any("node 0 was asked to leave, but no rank would be left" in line for line in live.said)


def test_who_has_come_back_is_one_of_the_others(live):
    assert needed(live, 1) == ""
    live.died(2, 3)
    live.generation(2)
    live.live(2, 0, 1)
    assert needed(live, 0) == "no rank would be left"
    live.joins(2, 3, node=1)
    assert live.offer(3).members == (0, 1, 2, 3)
    live.live(3, 0, 1, 2, 3)
    live.control.forget(keys.may_leave_key(0))
    assert needed(live, 0) == ""


def test_who_alone_has_layers_is_needed(live):
    live.planner.error = LayersLost((2, 3), (2, 3), num_layers=4)
    assert needed(live, 1) == "no other node has layer 2 and the head"


def test_without_whom_nothing_fits_is_needed(live):
    live.planner.error = PlanInfeasible("it needs 90 GiB of 80")
    assert needed(live, 1) == "the others could not go on: it needs 90 GiB of 80"


def test_who_asks_before_training_is_answered_when_there_is_a_plan(job):
    job.send(NodeLeaves(node=1))
    assert not job.control.has([keys.may_leave_key(1)])
    job.post()
    assert job.control.get(keys.may_leave_key(1), timeout_s=5) == ""


def test_the_end_says_why_all_have_ended():
    verdict = after_training(
        {0: 0}, [], refused="", ended_behind=7, because="node 0 was asked to leave, but no rank would be left"
    )
    assert verdict.code == EXIT_AS_ASKED
    assert verdict.why.endswith(
        "as a signal asked it to: node 0 was asked to leave, but no rank would be left."
    )
