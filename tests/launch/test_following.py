"""What comes next is looked for in a thread: a death is heard of meanwhile, and makes what was found useless."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.state import initial_state, with_speeds, without
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
    loses_one(job)
    assert job.begun.wait(10)
    yield job
    job.may_end.set()
    job.close()


def loses_one(job):
    """Rank 2, and trains on, with a plan to go to."""
    job.post()
    job.generation(1)
    job.live(1, 0, 1, 2, 3)
    aims_at(job, 1)
    job.died(2)
    job.generation(2)
    job.live(2, 0, 1, 3)


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
    loses_one(job)
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
    found_before = finds(5)
    job.looks(found_before)
    job.changes(generation=2, newest=2)  # as a message was lost
    assert job.ends(found_before) is None
    assert (job.said, [*read_journal(tmp_path)]) == ([], [])
    assert job.following.following(job.job, found_before, 12.0) is None, "it is of another generation"
    assert job.following._look is None
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


def test_a_recovery_during_a_look_has_the_last_word(tmp_path):
    job = Real(tmp_path)
    job.looks(slow_rank(5))
    left = without(job.job.cluster, {1})
    decided = replace(job.planner.decide(left, job.job.live_plan, 1.0), target=lambda: job.job.live_plan)
    job.following.recovered(decided, job.job.live_plan)
    job.changes(workers=left.workers, generation=2, newest=2)
    assert job.ends(slow_rank(5)) is None
    assert job.following._offers._target is decided.target


def test_looks_are_due_by_what_there_is_to_do(tmp_path):
    job = Real(tmp_path)
    job.may_end.set()
    offers, seen = job.following._offers, slow_rank(4)
    assert offers.is_due(job.job, seen, 1.0)
    job.following.following(job.job, seen, 1.0)
    offers = job.following._offers
    assert not offers.is_due(job.job, seen, 100.0), "nothing is slow, and nobody is away"
    assert offers.is_due(job.job, slow_rank(5), 100.0)
    offers.aim(lambda: job.job.live_plan)
    assert offers.is_due(job.job, seen, 1.1)
    offers.aim(None)
    for cluster in (with_speeds(job.job.cluster, {3: 0.5}), smaller(job.job.cluster)):
        kept = replace(job.job, cluster=cluster)
        assert not offers.is_due(kept, seen, 1.5)
        assert offers.is_due(kept, seen, 2.1)
    assert offers.is_due(replace(job.job, cluster=replace(job.job.cluster, fresh=frozenset({3}))), seen, 1.1)
    failed = replace(job.job, tries=job.job.tries.after_failure(1.0, for_now=True))
    assert not offers.is_due(failed, slow_rank(6), 2.0)


def smaller(cluster):
    cells = initial_state(nodes=(0,) * 2 * len(cluster.workers), cell_size=2).workers
    return replace(cluster, workers=(cells[0].smaller(1), *cells[1:]))


def test_a_copy_is_one_of_all_accounts(tmp_path):
    """What it changes is not changed in what it was made of, and plans stay the same objects."""
    job = Real(tmp_path)
    job.may_end.set()
    offers = job.following._offers
    for diagnosis in (slow_link(4), slow_link(5), slow_rank(6), slow_rank(7)):
        known, _ = offers.following(job.job, diagnosis, float(diagnosis.newest))
        job.job = replace(job.job, cluster=known.cluster)
    offers.following(job.job, slow_rank(8), 9.5)
    offers._aside.note(5, (5,), 10.0)
    copied = offers.copied(job.following._said)
    rebalancing, replacing = copied._rebalancing, copied._replacing
    assert rebalancing._links.slowed == offers._rebalancing._links.slowed != {}
    assert rebalancing._workers.speeds == {5: 0.5}
    assert replacing._known[0] is job.job.live_plan
    assert copied._planner is replacing.planner is job.planner
    assert rebalancing._told is rebalancing._workers._told is not offers._rebalancing._told
    assert replacing.journal is job.following._said
    rebalancing._links.slowed.clear()
    rebalancing._workers.speeds.clear()
    replacing._accounts.clear()
    copied._aside._cells.clear()
    assert offers._rebalancing._links.slowed
    assert offers._rebalancing._workers.speeds
    assert offers._replacing._accounts
    assert offers._aside._cells
