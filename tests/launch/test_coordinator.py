"""The coordinator alone: events in, generations and a verdict out; its planner is the test's."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from odyssey_megatron.cluster.events import (
    OfferFailed,
    RankFinished,
    Retry,
)
from odyssey_megatron.codec import to_json
from odyssey_megatron.errors import EXIT_FENCED, ConfigError, LayersLost, PlanInfeasible
from odyssey_megatron.launch.coordinator import offer_tries
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import EVENTS
from odyssey_megatron.launch.wire.verdict import JobVerdict
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.sending.generation import Finished, Generation
from tests.launch.jobserver import events
from tests.launch.played import PLAN, Job


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.fixture
def started(job):
    job.post()
    assert job.generation(1).members == (0, 1, 2, 3)
    return job


def test_the_first_generation_waits_for_all_ranks(job):
    assert job.absent(1)
    job.post()
    first = job.generation(1)
    assert (first.previous, first.dead, first.plan_hash) == (None, (), PLAN.hash())
    assert (first.plan.layout.holders, first.plan.program(0)) == (PLAN.layout.holders, PLAN.program(0))


def test_a_death_in_a_live_generation(started):
    started.live(1, 0, 1, 2, 3)
    started.died(2)
    second = started.generation(2)
    assert (second.members, second.dead, second.plan.step_s) == ((0, 1, 3), (2,), 2.0)
    assert second.previous.holders == ((0,),), "of the layout before, a rank reads what it had itself"
    assert started.planner.previous == [PLAN]


def test_who_runs_out_of_memory_and_alone_has_layers_tries_once_more(started):
    """Left out, it would take its layers along, and the job with it."""
    decide = started.planner.decide

    def no_less(plan, worker, state):
        started.planner.error = PlanInfeasible("no plan needs less")

    def decide_once(*args):
        try:
            return decide(*args)
        finally:
            started.planner.error = None

    started.planner.ran_out, started.planner.decide = no_less, decide_once
    started.live(1, 0, 1, 2, 3)
    started.died(1, 2, 3)
    first = next(one for one in (2, 3, 4) if started.generation(one).members == (0,))
    for number, done in ((first, 0), (first + 1, 1), (first + 2, 1)):  # a step is done in the second of them
        assert started.generation(number).members == (0,)
        started.live(number, 0, done=done)
        started.send(Retry(rank=0, generation=number, reason="out of memory", out_of_memory=True))
    assert started.end().code == 1
    tried, again, left_out = (
        line for line in started.said if "run out of memory" in line and "rank(s) [0]" in line
    )
    assert "try once more" in tried
    assert "try once more" in again
    assert "left out" in left_out


def test_nothing_is_decided_once_an_agent_has_ended_the_job(started):
    """By a signal. Its ranks are then ended one after the other."""
    started.live(1, 0, 1, 2, 3)
    started.control.put(keys.VERDICT, to_json(JobVerdict(code=143, why="the job was ended")))
    started.died(2, 3)
    assert started.end() is None
    assert started.absent(2)
    assert not events(Path(started.config.run_dir), "failure_detected")


def test_two_deaths_of_one_incident_are_one_decision(started):
    started.live(1, 0, 1, 2, 3)
    started.died(0, 3)
    assert started.generation(2).dead == (0, 3)
    assert started.absent(3)


def test_until_all_report_live_the_last_live_plan_is_the_truth(started):
    started.live(1, 0, 1, 2, 3)
    started.died(3)
    second = started.generation(2)
    started.live(2, 0, 1)
    started.died(2)
    third = started.generation(3)
    started.live(3, 0, 1)
    started.died(1)
    started.generation(4)
    assert [plan.step_s for plan in started.planner.previous] == [PLAN.step_s, PLAN.step_s, third.plan.step_s]
    assert second.plan.step_s != third.plan.step_s


def test_a_death_before_anybody_trained_needs_no_transfers(started):
    started.live(1, 0, 1, 2)
    started.died(3)
    second = started.generation(2)
    assert (second.previous, second.plan.transfers) == (None, ())
    assert second.plan_hash != PLAN.hash()


def test_retries_of_the_current_generation_only(started):
    started.live(1, 0, 1, 2, 3)
    started.send(Retry(rank=1, generation=1, reason="lost a message"))
    second = started.generation(2)
    assert second.members == (0, 1, 2, 3)
    assert "rank 1 asked for it: lost a message" in second.why
    started.send(Retry(rank=2, generation=1, reason="late"))
    assert started.absent(3)


@pytest.mark.parametrize("begin", [False, True])
def test_fresh_groups_that_never_help(started, begin):
    """Whether or not those generations begin: no step is done in them."""
    started.live(1, 0, 1, 2, 3, done=7)
    for number in range(1, 22):
        assert started.generation(number).members == (0, 1, 2, 3)
        if begin and number > 1:
            started.live(number, 0, 1, 2, 3, done=7)
        started.send(Retry(rank=1, generation=number, reason="lost a message"))
    last = started.generation(22)
    assert last.code == 1
    assert "20 generations in a row have come to nothing" in last.why
    assert "rank 1 asked for it: lost a message" in last.why
    assert started.end().code == 1


def test_fresh_groups_for_as_long_as_steps_are_done(started):
    for number in range(1, 30):
        assert isinstance(started.generation(number), Generation)
        started.live(number, 0, 1, 2, 3, done=number // 9)
        started.send(Retry(rank=1, generation=number, reason="lost a message"))
    assert isinstance(started.generation(30), Generation)


@pytest.mark.parametrize("change", ["a death", "a return"])
def test_fresh_groups_count_anew_when_membership_has_changed(started, change):
    started.died(3)
    for number in range(2, 17):
        assert started.generation(number).members == (0, 1, 2)
        started.send(Retry(rank=1, generation=number, reason="lost a message"))
    assert started.generation(17).members == (0, 1, 2)
    if change == "a death":
        started.died(2)
        assert started.generation(18).members == (0, 1)
    else:
        started.joins(3)
        started.control.get(keys.welcome_key(3, 1), timeout_s=5)
    for number in range(17 + (change == "a death"), 33):
        assert isinstance(started.generation(number), Generation)
        started.send(Retry(rank=1, generation=number, reason="lost a message"))
    assert isinstance(started.generation(33), Generation)


def test_what_a_generation_left_in_the_store_goes_when_the_next_one_is_live(started):
    started.control.store.set("groups/1/world/0", "address")
    started.live(1, 0, 1, 2, 3)
    started.died(3)
    started.generation(2)
    started.control.store.set("groups/2/world/0", "address")
    started.live(2, 0, 1)
    assert started.control.has(["groups/1/world/0", keys.generation_key(1)])
    started.live(2, 2)
    time.sleep(0.15)
    assert not started.control.store.check(["groups/1/world/0"])
    assert not started.control.store.check([keys.generation_key(1)])
    assert started.control.has(["groups/2/world/0", keys.generation_key(2), keys.JOB])


def test_events_that_nobody_of_this_job_sent_are_dropped(started):
    started.control.store.queue_push(EVENTS, "{}")
    started.control.store.queue_push(EVENTS, started.control.seal(EVENTS, '{"kind":"RankDied"}'))
    assert started.absent(2)
    started.died(1)
    assert started.generation(2).dead == (1,)


def test_a_silent_agent(started):
    started.live(1, 0, 1, 2, 3)
    started.beating.set()
    assert started.generation(2).members == (0, 1)


def test_finish(started):
    started.live(1, 0, 1, 2, 3)
    started.send(*(RankFinished(rank=rank, generation=1) for rank in range(3)))
    assert started.absent(2)
    started.send(RankFinished(rank=3, generation=1))
    assert started.generation(2) == Finished(number=2)
    started.died(0, 1, 2, 3, code=0)
    assert started.end().code == 0
    assert started.planner.finished


def test_a_death_sends_those_who_had_finished_back(started):
    started.live(1, 0, 1, 2, 3)
    started.finished(1, 0, 1)
    started.died(3)
    assert started.generation(2).members == (0, 1, 2)
    started.finished(1, 0)  # from before it heard of the new generation
    started.live(2, 1, 2)
    started.finished(2, 1, 2)
    assert started.absent(3)
    started.live(2, 0)
    started.finished(2, 0)
    assert started.generation(3) == Finished(number=3)


def test_a_node_that_is_lost_after_its_ranks_have_finished(started):
    started.live(1, 0, 1, 2, 3)
    started.finished(1, 2, 3)
    started.beating.set()
    assert started.absent(2), "nobody misses them"
    time.sleep(2 * started.config.node_lease_s)
    started.finished(1, 0, 1)
    assert started.generation(2) == Finished(number=2)
    started.died(0, 1, code=0)
    verdict = started.end()
    assert verdict.code == 1
    assert "rank(s) [2, 3] were killed behind the job's last step" in verdict.why


def test_who_had_finished_and_died_is_not_waited_for_in_another_generation(started):
    started.live(1, 0, 1, 2, 3)
    started.finished(1, 0)
    started.died(0)
    assert started.absent(2), "nobody misses it"
    started.died(3)
    assert started.generation(2).members == (1, 2)
    started.live(2, 1, 2)
    started.finished(2, 1, 2)
    assert started.generation(3) == Finished(number=3)
    started.died(1, 2, code=0)
    assert started.end().code == 0, "the others have done its part again"


def test_whoever_was_to_take_the_place_of_one_that_had_finished_does_not_end_the_job(started):
    started.live(1, 0, 1, 2, 3)
    started.finished(1, 0, 1, 2)
    started.died(2)
    started.control.put(keys.left_key(2), "")
    started.joins(2)
    assert started.control.get(keys.welcome_key(2, 1), timeout_s=5) == keys.NOT_WELCOME
    started.finished(1, 3)
    assert started.generation(2) == Finished(number=2)
    started.died(2, code=EXIT_FENCED, incarnation=1)
    started.died(0, 1, 3, code=0)
    assert started.end().code == 0


def test_the_last_holders_may_end_by_an_error_of_their_own(started):
    """As those of a broken GPU do. The others are as they were, so it was no mistake of the job's."""
    started.live(1, 0, 1, 2, 3)
    started.planner.error = LayersLost((4, 5), (2,), num_layers=6)
    started.died(2, code=1)
    assert started.generation(2).code == 93
    assert started.end().code == 93


def test_all_ranks_end_by_the_same_error_one_after_the_other(started):
    started.live(1, 0, 1, 2, 3)
    started.planner.error = LayersLost((4, 5), (2,), num_layers=6)
    for rank in (2, 0, 1, 3):
        started.died(rank, code=7)
        time.sleep(0.05)
    assert started.end().code == 7


def test_a_rank_that_joins_is_offered_a_place_between_two_steps(started):
    started.live(1, 0, 1, 2, 3)
    started.died(2)
    assert started.generation(2).members == (0, 1, 3)
    started.joins(2)
    assert started.control.get(keys.welcome_key(2, 1), timeout_s=5) == "2"
    assert started.absent(3), "not before the survivors are live in theirs"
    started.live(2, 0, 1, 3)
    offer = started.offer(3)
    assert (offer.members, offer.dead, offer.planned) == ((0, 1, 2, 3), (), True)
    assert offer.incarnations == ((2, 1),)
    started.live(3, 0, 1, 2)
    started.died(0)
    after = started.generation(4)
    before = started.generation(2).plan.step_s
    assert started.planner.previous[-1].step_s == before, "not all had entered the offered one"
    assert (after.members, after.fresh) == ((1, 3), (2,)), (
        "rank 2 holds nothing, and is offered a place later"
    )
    started.live(4, 1, 3)
    assert started.offer(5).members == (1, 2, 3)


def test_an_offer_that_all_have_entered_is_the_truth(started):
    started.live(1, 0, 1, 2, 3)
    started.died(2)
    started.joins(2)
    assert started.generation(2).members == (0, 1, 3), "not even if it is back by then"
    started.live(2, 0, 1, 3)
    offer = started.offer(3)
    started.live(3, 0, 1, 2, 3)
    started.died(0)
    started.generation(4)
    assert started.planner.previous[-1].step_s == offer.plan.step_s


def test_a_living_rank_has_no_second_process(started):
    started.live(1, 0, 1, 2, 3)
    started.joins(2)
    assert started.control.get(keys.welcome_key(2, 1), timeout_s=5) == keys.NOT_WELCOME
    assert started.absent(2)


def test_a_rank_that_dies_before_it_is_offered_a_place_costs_the_others_nothing(started):
    started.live(1, 0, 1, 2, 3)
    started.died(2)
    started.generation(2)
    started.joins(2)
    started.died(2, incarnation=1)
    started.live(2, 0, 1, 3)
    assert started.absent(3)


def test_an_offer_that_cannot_be_prepared_is_made_again_and_then_much_later(started, monkeypatch):
    monkeypatch.setattr(offer_tries, "_AGAIN_S", 1.0)
    started.live(1, 0, 1, 2, 3)
    started.died(2)
    started.joins(2)
    assert started.generation(2).members == (0, 1, 3), "not even if it is back by then"
    started.live(2, 0, 1, 3)
    for number in (3, 4, 5):
        assert started.offer(number).members == (0, 1, 2, 3)
        started.send(OfferFailed(rank=1, generation=number, reason="no address"))
    assert started.absent(6)
    assert started.offer(6).members == (0, 1, 2, 3)
    started.send(OfferFailed(rank=1, generation=6, reason="no address"))
    assert started.absent(7), "one more try, and a pause again"
    assert started.offer(7).members == (0, 1, 2, 3)


def test_a_better_layout_is_offered_after_a_recovery_that_moved_nothing(started):
    started.planner.target = replace(PLAN, policy="replan", layout=Layout(holders=((1,),), routes=()))
    started.live(1, 0, 1, 2, 3)
    started.died(2)
    started.generation(2)
    started.live(2, 0, 1, 3)
    offered, target = started.offer(3).plan, started.planner.target
    assert (offered.policy, offered.layout.holders) == (target.policy, target.layout.holders)
    started.live(3, 0, 1, 3)
    assert started.absent(4), "it is there"


def test_finished_while_an_offer_is_open(started):
    started.live(1, 0, 1, 2, 3)
    started.died(2)
    started.joins(2)
    assert started.generation(2).members == (0, 1, 3), "not even if it is back by then"
    started.live(2, 0, 1, 3)
    started.offer(3)
    started.finished(2, 0, 1, 3)
    assert started.generation(4) == Finished(number=4)


def test_a_failing_exit_after_the_end_fails_the_job(started):
    started.live(1, 0, 1, 2, 3)
    started.send(*(RankFinished(rank=rank, generation=1) for rank in range(4)))
    started.died(0, 1, 2, code=0)
    started.died(3, code=6)
    assert started.end().code == 6


def test_layers_lost(started):
    started.live(1, 0, 1, 2, 3)
    started.planner.error = LayersLost((4, 5), (2,), num_layers=6)
    started.died(2)
    second = started.generation(2)
    assert (second.number, second.code) == (2, 93)
    assert "no holder is left of layer 4 and the head" in second.why
    assert started.end().code == 93


def test_layers_lost_with_ranks_that_failed_by_themselves(started):
    started.live(1, 0, 1, 2, 3)
    started.planner.error = LayersLost((4, 5), (2,), num_layers=6)
    started.died(2, code=7)
    second = started.generation(2)
    assert second.code == 93
    assert "no holder is left of layer 4 and the head" in second.why
    assert second.why.endswith("Rank(s) [2] ended with exit code 7; their logs say why.")


def test_no_plan(started):
    started.live(1, 0, 1, 2, 3)
    started.planner.error = PlanInfeasible("nothing fits")
    started.died(2)
    assert started.generation(2).code == 1
    assert started.end().code == 1


def test_a_bug_in_the_planner_ends_the_job(started):
    started.live(1, 0, 1, 2, 3)
    started.planner.error = ZeroDivisionError("oops")
    started.died(2)
    assert started.end().code == 1
    assert "ZeroDivisionError" in "".join(started.said)


def test_a_job_that_cannot_be_planned(job):
    job.planner.start_error = ConfigError("too many stages.")
    job.post()
    assert (job.generation(1).why, job.generation(1).code) == ("too many stages.", 2)
    assert job.end().code == 2


def test_a_rank_that_fails_before_the_job_is_posted(job):
    job.died(1, code=4)
    assert job.end().code == 4


def test_a_rank_that_dies_as_the_last_one_posts_the_job(job):
    """The coordinator waits in its queue of events then, and hears of both at once."""
    job.post()
    job.died(1)
    while (generation := job.generation(job.coordinator._job.cluster.generation or 1)).dead != (1,):
        time.sleep(0.01)
    assert generation.members == (0, 2, 3)


def test_all_ranks_fail_alike_in_training(started):
    started.live(1, 0, 1, 2, 3)
    started.died(0, 1, 2, 3, code=5)
    assert started.end().code == 5


@pytest.fixture
def observed(tmp_path):
    job = Job(tmp_path, mode="observe")
    job.post()
    job.generation(1)  # published, though no rank reads it
    yield job
    job.close()


def test_an_observed_job_ends_when_all_ranks_have(observed):
    observed.died(0, 1, code=0)
    observed.died(2, 3, code=0)
    assert observed.end().code == 0
    assert not observed.planner.previous, "there was nothing to decide"


def test_the_first_failure_of_an_observed_job_is_decided_on_and_its_last(observed):
    observed.died(3, code=0)
    observed.died(1)
    verdict = observed.end()
    assert (verdict.code, len(observed.planner.previous)) == (1, 1)
    assert verdict.why.startswith("the loss of rank(s) [1] ends the job")
    assert verdict.why.endswith("would have gone on as decided above.")


def test_an_observed_job_that_recover_could_not_have_saved(observed):
    observed.planner.error = LayersLost((1,), (0, 1), num_layers=6)
    observed.died(0, 1)
    verdict = observed.end()
    assert verdict.code == 1
    assert "would have stopped: no holder is left of layer 1" in verdict.why


def test_an_observed_job_runs_even_if_there_is_no_plan_for_it(tmp_path):
    job = Job(tmp_path, mode="observe")
    job.planner.start_error = PlanInfeasible("too little memory")
    job.post()
    job.generation(1)
    job.died(0)
    assert "would have stopped: too little memory" in job.end().why
    job.close()
