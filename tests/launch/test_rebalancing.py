"""What the coordinator does about a diagnosis: the planner is the product's, the diagnosis the test's."""

from __future__ import annotations

import pytest

from odyssey_megatron.diagnosis.lasting import remaining_s
from odyssey_megatron.diagnosis.verdicts import Diagnosis, Verdict
from odyssey_megatron.launch.rebalancing import Rebalancing, changes
from odyssey_megatron.metrics.journal import Journal, read_journal
from tests.policy.test_history import planner_of


def slow(**factors) -> Diagnosis:
    """``w5=2.0``: worker 5 takes twice the time."""
    verdicts = (
        Verdict(kind="slow worker", worker=int(name[1:]), factor=factor, evidence="by the test")
        for name, factor in factors.items()
    )
    return Diagnosis(verdicts=tuple(verdicts), costs={})


@pytest.fixture
def job(tmp_path):
    planner, plan, state = planner_of()
    said: list[str] = []

    def made(*, acts: bool) -> Rebalancing:
        return Rebalancing(planner, Journal(tmp_path, source="agent0"), said.append, acts=acts)

    made.plan, made.state, made.said, made.folder = plan, state, said, tmp_path
    return made


def test_found_mended_and_back(job):
    rebalancing = job(acts=True)
    state, better = rebalancing.look(slow(w5=2.0), job.state, job.plan, 10.0)
    assert state.workers[5].speed == 0.5
    assert "rank(s) [5] slow, 2.00 times the time: steps" in better.why
    mended = better.decided.plan
    state, back = rebalancing.look(slow(), state, mended, 20.0)
    assert state == job.state
    assert back.decided.plan.layout == job.plan.layout
    assert [(e["slow_ranks"], e["speed"]) for e in read_journal(job.folder)] == [([5], 0.5), ([5], 1.0)]


def test_off_only_says_so(job):
    rebalancing = job(acts=False)
    assert rebalancing.look(slow(w5=2.0), job.state, job.plan, 10.0) == (job.state, None)
    assert rebalancing.look(slow(w5=2.1), job.state, job.plan, 11.0) == (job.state, None)
    (said,) = job.said
    assert "with --odyssey-rebalance auto" in said
    assert rebalancing.look(slow(), job.state, job.plan, 20.0) == (job.state, None)
    assert [(e["slow_ranks"], e["speed"]) for e in read_journal(job.folder)] == [([5], 0.5), ([5], 1.0)]


def test_each_diagnosis_is_looked_at_once(job):
    rebalancing, diagnosis = job(acts=True), slow(w5=2.0)
    assert rebalancing.look(diagnosis, job.state, job.plan, 10.0)[1] is not None
    assert rebalancing.look(diagnosis, job.state, job.plan, 11.0) == (job.state, None)
    assert rebalancing.look(None, job.state, job.plan, 11.0) == (job.state, None)


def test_a_stage_that_is_dear_is_said_once(job):
    rebalancing = job(acts=True)
    for _ in range(3):
        uneven = Verdict(kind="uneven stage", layers=(7, 10), factor=1.5, evidence="is heavy")
        found = rebalancing.look(Diagnosis(verdicts=(uneven,), costs={}), job.state, job.plan, 0.0)
        assert found == (job.state, None)
    (event,) = read_journal(job.folder)
    assert (event["kind"], event["why"]) == ("uneven stage", "layers 7 to 8 and the head: is heavy")


def test_little_is_nothing(job):
    state = job.state
    assert changes(state, {5: 1 / 1.05}) == {}
    assert changes(state, {5: 1 / 1.2}) == {5: 1 / 1.2}
    (state_5,) = (job(acts=True).look(slow(w5=2.0), state, job.plan, 0.0)[0],)
    assert changes(state_5, {5: 1 / 2.2}) == {}
    assert changes(state_5, {5: 1 / 1.05}) == {}, "not certainly over"
    assert changes(state_5, {5: 1 / 3.0}) == {5: 1 / 3.0}
    assert changes(state_5, {}) == {5: 1.0}


def test_how_long_it_will_last():
    assert remaining_s(0.0) == 600.0
    assert remaining_s(1000.0) > remaining_s(0.0), "the longer it has lasted"
    assert remaining_s(0.0, [1.0] * 10) < 60.0, "where it is always over soon"
