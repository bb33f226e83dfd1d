"""A node that is asked to leave may do so if the others can go on without it. Otherwise the job is to end."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import STARTS_OF_AN_AGENT, NodeLeaves, RankDied
from odyssey_megatron.errors import EXIT_AS_ASKED, EXIT_NOT_SAVED
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.verdict import after_training
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.policy.decided import Decided
from tests.launch.played import PLAN, Job


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


def came_back(live, incarnation: int) -> str:
    """Why node 0 cannot leave once node 1 has left, and its ranks have come back with ``incarnation``."""
    assert needed(live, 1) == ""
    live.died(2, 3)
    live.generation(2)
    live.live(2, 0, 1)
    live.joins(2, 3, node=1, incarnation=incarnation)
    assert live.offer(3).members == (0, 1, 2, 3)
    live.live(3, 0, 1, 2, 3)
    return needed(live, 0)


def test_who_has_come_back_is_one_of_the_others(live):
    assert came_back(live, STARTS_OF_AN_AGENT) == ""


def test_whom_the_same_agent_has_started_again_leaves_nevertheless(live):
    assert came_back(live, 1) == "no rank would be left"


def test_who_alone_has_layers_is_needed(job):
    layout = Layout(holders=((0, 1), (0, 1), (2, 3), (2, 3)), routes=())
    job.planner.start = lambda *_: Decided(plan=replace(PLAN, layout=layout), rows=())
    job.post()
    job.live(1, 0, 1, 2, 3)
    assert needed(job, 1) == "no other node has layer 2 and the head"
    assert not job.planner.previous, "a question is no decision"


def test_who_asks_before_training_is_answered_when_all_train(job):
    job.send(NodeLeaves(node=1))
    job.post()
    job.generation(1)
    assert unanswered(job, 1)
    job.live(1, 0, 1, 2, 3)
    assert job.control.get(keys.may_leave_key(1), timeout_s=5) == ""


def unanswered(job: Job, node: int) -> bool:
    time.sleep(0.3)
    return not job.control.has([keys.may_leave_key(node)])


def test_the_answer_goes_by_the_plan_of_a_recovery_that_is_under_way(live):
    """Its plan may leave layers on one node that were on two."""
    live.send(NodeLeaves(node=1), RankDied(rank=1, code=-9, cause="killed"))
    assert live.generation(2).members == (0, 2, 3)
    live.live(2, 0, 2)
    assert unanswered(live, 1)
    live.live(2, 3)
    assert live.control.get(keys.may_leave_key(1), timeout_s=5) == ""


def test_the_answer_waits_for_an_offer(live):
    live.died(3)
    live.generation(2)
    live.live(2, 0, 1, 2)
    live.joins(3, node=1)
    live.offer(3)
    live.send(NodeLeaves(node=1))
    assert unanswered(live, 1)
    live.live(3, 0, 1, 2, 3)
    assert live.control.get(keys.may_leave_key(1), timeout_s=5) == ""


def test_who_alone_has_layers_is_told_so_while_a_plan_is_on_offer(live):
    live.died(2, 3)
    live.generation(2)
    live.live(2, 0, 1)
    live.joins(2, 3, node=1)
    live.offer(3)
    assert needed(live, 0) == "no rank would be left"


def test_the_end_says_why_all_have_ended():
    verdict = after_training(
        {0: 0}, [], refused="", ended_behind=7, because="node 0 was asked to leave, but no rank would be left"
    )
    assert verdict.code == EXIT_AS_ASKED
    assert verdict.why.endswith(
        "as a signal asked it to: node 0 was asked to leave, but no rank would be left."
    )


def test_a_job_that_a_signal_has_ended_can_go_on_though_its_last_checkpoint_failed():
    """With steps left to train, it is to be queued again as after any other signal."""
    exits = {0: EXIT_NOT_SAVED, 1: EXIT_NOT_SAVED}
    early = after_training(exits, [], refused="", ended_behind=7)
    assert early.code == EXIT_AS_ASKED
    assert early.why.startswith(
        "the job has ended after iteration 7, as a signal asked it to. Its last checkpoint"
    )
    assert "rank 0 ended with exit code 96" in early.why
    assert after_training(exits, [], refused="", ended_behind=-1).code == EXIT_NOT_SAVED
    for code in (1, -9):
        worse = after_training(exits | {1: code}, [1], refused="", ended_behind=7)
        assert worse.code == 1, "what else went wrong comes first"
