"""What generations leave in the store while a rank waits for a place that it never gets; and who still reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from odyssey_megatron.cluster.events import OfferFailed, Retry
from odyssey_megatron.launch.coordinator import offer_tries
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire import generations
from odyssey_megatron.plan.sending.generation import Generation
from tests.launch.jobserver import wait_for
from tests.launch.played import Job
from tests.launch.test_entering import joining
from tests.plan.test_wire import planned

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def waited(tmp_path, monkeypatch):
    """A job in which rank 3 has come back, and which can make another offer at once when one has failed."""
    monkeypatch.setattr(offer_tries, "_AGAIN_S", 0.0)
    job = Job(tmp_path)
    job.post()
    job.generation(1)
    job.live(1, 0, 1, 2, 3)
    job.died(3)
    job.generation(2)
    job.live(2, 0, 1, 2)
    job.joins(3)
    yield job
    job.close()


def left(job: Job) -> set[str]:
    return {key for _, key in job.control.of_generations()}


def test_of_offers_that_fail_a_mark_stays(waited):
    """As of a node that reaches the store, but not one of its peers. Each offer has a whole plan."""
    current = {keys.generation_key(2), keys.part_key(2, 0)}
    for number in range(3, 13):
        assert waited.offer(number).fresh == (3,)
        waited.control.store.set(f"groups/{number}/world/0", "address")
        waited.send(OfferFailed(rank=0, generation=number, reason="no address"))
    waited.offer(13)
    mine = {key for key in left(waited) if not key.startswith(keys.generation_key(13))}
    marks = {keys.generation_key(number) for number in range(3, 13)}
    assert current < mine
    extra = {key for key in mine if not key.startswith(keys.generation_key(2))} - marks
    assert extra == {"groups/12/world/0"}, "a rank may be about to read it"
    assert all(waited.control.get(mark) == keys.OFFER for mark in marks)


def test_recoveries_leave_nothing_though_a_rank_waits(waited):
    current = 2
    for offered in range(3, 23, 2):
        waited.offer(offered)
        waited.send(Retry(rank=0, generation=current, reason="again", patience_s=60.0))
        current = offered + 1
        waited.generation(current)
        waited.live(current, 0, 1, 2, done=offered)
    waited.offer(current + 1)

    def numbers() -> set[int]:
        return {number for number, _ in waited.control.of_generations()}

    wait_for(lambda: numbers() == {current, current + 1}, 10, "those before to be forgotten")


def test_a_rank_that_reads_an_offer_late_waits_for_the_next(connect):
    """One that has a place prepares nothing, and one that is to get a place does not wait for what is deleted."""
    coordinator, (_, plan) = connect(), planned("reroute")
    offers = {
        number: Generation(
            number=number, members=(*range(12),), dead=(), why="joined", previous=None, plan=plan,
            plan_hash=plan.hash(), planned=True, incarnations=((2, 1),), fresh=(2,),
        )
        for number in (2, 3)
    }  # fmt: skip
    generations.send(offers[2], 1, coordinator)
    whole = coordinator.get(keys.generation_key(2)).removeprefix(keys.OFFER)
    generations.withdraw(2, 1, coordinator)
    assert generations.read(whole, 2, coordinator) is None, "it had read the head before"
    prepares = SimpleNamespace(rank=0, incarnation=0, _watcher_control=coordinator, _on_offer=pytest.fail)
    Member._hear_offer(prepares, coordinator.get(keys.generation_key(2)).removeprefix(keys.OFFER))
    watch, entering = joining(connect)
    watch.start(1)
    assert watch.await_any(1) == (2, "", True)
    generations.send(offers[3], 1, coordinator)
    assert entering.next_generation(1).number == 3
