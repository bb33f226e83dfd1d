"""What comes next is looked for in a thread: a death is heard of meanwhile, and makes what was found useless."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from odyssey_megatron.plan.layout import Layout
from tests.launch.played import PLAN, Job


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
