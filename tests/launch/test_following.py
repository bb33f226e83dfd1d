"""What comes next is looked for in a thread: a death is heard of meanwhile, and makes what was found useless."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.state import without
from odyssey_megatron.diagnosis.verdicts import Diagnosis, Verdict
from odyssey_megatron.launch.coordinator.following import Following
from odyssey_megatron.launch.coordinator.offers import Offers
from odyssey_megatron.launch.coordinator.reactions import JobState
from odyssey_megatron.launch.coordinator.rebalancing import Rebalancing
from odyssey_megatron.launch.coordinator.replacing import Replacing
from odyssey_megatron.launch.coordinator.said import Said
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.plan.layout import Layout
from tests.launch.jobserver import wait_for
from tests.launch.looks import job_in
from tests.launch.played import PLAN, Job
from tests.launch.test_slow_ways import with_link


@pytest.fixture
def looking(tmp_path):
    """A job that has lost rank 2, and whose look for the plan after that lasts until it is let."""
    job = Job(tmp_path)
    job.begun, job.may_end, job.looks = threading.Event(), threading.Event(), []

    def towards(state, current, target):
        job.looks.append(target.layout.holders)
        job.begun.set()
        assert job.may_end.wait(60)
        return target

    job.planner.towards = towards
    job.post()
    job.generation(1)
    job.live(1, 0, 1, 2, 3)
    aims_at(job, 1)
    job.died(2)
    job.generation(2)
    job.live(2, 0, 1, 3)
    assert job.begun.wait(10)
    yield job
    job.may_end.set()
    job.close()


def aims_at(job, holder):
    job.planner.target = replace(PLAN, policy="replan", layout=Layout(holders=((holder,),), routes=()))


def test_a_look_that_lasts_leads_to_an_offer(looking):
    assert looking.absent(3)
    looking.may_end.set()
    assert looking.offer(3).plan.layout.holders == ((1,),)
    assert looking.looks == [((1,),)], "one look is enough"


def test_a_death_during_a_look_is_mended_at_once_and_the_next_look_knows_of_it(looking):
    aims_at(looking, 3)
    looking.died(1)
    assert looking.generation(3).dead == (1,)
    looking.live(3, 0, 3)
    assert looking.absent(4)
    looking.may_end.set()
    assert looking.offer(4).plan.layout.holders == ((3,),)
    assert looking.looks == [((1,),), ((3,),)]


def test_a_job_ends_without_waiting_for_a_look(looking):
    looking.died(0, 1, 3, code=1)
    assert looking.end().code == 1


def test_an_error_of_a_look_is_one_of_the_coordinator(tmp_path):
    job = Job(tmp_path)
    job.planner.towards = lambda *given: 1 // 0
    job.post()
    job.generation(1)
    job.live(1, 0, 1, 2, 3)
    aims_at(job, 1)
    job.died(2)
    job.generation(2)
    job.live(2, 0, 1, 3)
    assert "ZeroDivisionError" in job.end().why
    job.close()


def slow_rank(step):
    verdict = Verdict(kind="slow worker", worker=5, factor=2.0, found=4, evidence="by the test")
    return Diagnosis(verdicts=(verdict,), costs={}, latest={5: 2.0}, newest=step)


def slow_link(step):
    return with_link(step, 9.0)


def uneven_stage(step):
    verdict = Verdict(kind="uneven stage", layers=(0, 4), factor=1.5, found=4, evidence="by the test")
    return Diagnosis(verdicts=(verdict,), costs={}, newest=step)


class Real:
    """The coordinator's part of a healthy job with the real planner, whose search for a better plan waits to be let."""

    def __init__(self, folder):
        known = job_in(folder)
        self.planner, self.folder, self.said = known.planner, folder, []
        self.begun, self.may_end, self.error = threading.Event(), threading.Event(), None
        search = self.planner.rebalance

        def rebalance(*given, **more):
            self.begun.set()
            assert self.may_end.wait(60)
            if self.error:
                raise self.error
            return search(*given, **more)

        self.planner.rebalance = rebalance
        said = Said(Journal(folder, source="agent0"), self.said.append)
        rebalancing = Rebalancing(self.planner, said, said.say, acts=True)
        replacing = Replacing(self.planner, said, said.say, acts=True, restarts=True)
        self.following = Following(Offers(self.planner, rebalancing, replacing), said)
        cluster = replace(known.state, generation=1, newest=1)
        self.job = JobState(
            cluster=cluster, nodes=(0,) * len(cluster.workers), start_plan=known.plan, live_plan=known.plan
        )

    def looks(self, diagnosis):
        assert self.following.following(self.job, diagnosis, 10.0) is None
        assert self.begun.wait(10)

    def changes(self, **cluster):
        self.job = replace(self.job, cluster=replace(self.job.cluster, **cluster))

    def ends(self, diagnosis):
        """What the look has come to."""
        self.may_end.set()
        wait_for(lambda: self.following._look.over.is_set(), 30, "the end of the look")
        return self.following.following(self.job, diagnosis, 11.0)


@pytest.mark.parametrize("finds", [slow_rank, slow_link, uneven_stage])
def test_what_a_dropped_look_has_found_is_found_again(tmp_path, finds):
    job = Real(tmp_path)
    job.looks(finds(5))
    job.changes(generation=2, newest=2)  # as a message was lost
    assert job.ends(finds(5)) is None
    assert (job.said, [*read_journal(tmp_path)]) == ([], [])
    assert job.following.following(job.job, None, 12.0) is None
    found = job.following.following(job.job, finds(6), 13.0) or job.ends(finds(6))
    assert [one["event"] for one in read_journal(tmp_path)] == ["slowness"]
    assert found.proposal is not None


def test_ranks_that_wait_for_a_place_make_no_look_useless(tmp_path):
    job = Real(tmp_path)
    job.looks(slow_rank(5))
    job.changes(joining=frozenset({1}), incarnations=((1, 3),), failure_times_s=(9.5,))
    found = job.ends(slow_rank(5))
    assert found.proposal is not None
    assert found.job.cluster.workers[5].speed == 0.5
    assert found.job.cluster == replace(job.job.cluster, workers=found.job.cluster.workers)


@pytest.mark.parametrize("is_as_it_was", [True, False])
def test_an_error_is_one_of_the_job_that_it_is_about(tmp_path, is_as_it_was):
    job = Real(tmp_path)
    job.error = ZeroDivisionError("by the test")
    job.looks(slow_rank(5))
    if is_as_it_was:
        with pytest.raises(ZeroDivisionError):
            job.ends(slow_rank(5))
        return
    job.changes(generation=2, newest=2)
    assert job.ends(slow_rank(5)) is None


def test_a_dropped_look_leaves_the_way_that_the_job_was_on(tmp_path):
    job = Real(tmp_path)
    target = job.planner.decide(without(job.job.cluster, {1}), job.job.live_plan, 1.0).plan
    job.following._offers.aim(lambda: target)
    job.looks(slow_rank(5))
    job.changes(generation=2, newest=2)
    assert job.ends(slow_rank(5)) is None
    assert job.following._offers._target() is target
