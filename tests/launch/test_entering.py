"""What a generation is to a process: whether it enters it, waits, or leaves."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from odyssey_megatron.errors import ControlPlaneLost, Superseded
from odyssey_megatron.launch.rank.attention import Attention
from odyssey_megatron.launch.rank.entering import Entering, Role, concerns, part_in, why_without
from odyssey_megatron.launch.rank.watch import Watch
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.plan.sending.generation import Generation
from tests.plan.test_wire import planned

_, PLAN = planned("reroute")
GENERATION = Generation(
    number=4, members=(0, 1, 2, 3), dead=(6,), why="failure", previous=None, plan=PLAN, plan_hash=PLAN.hash(),
    incarnations=((3, 1), (5, 2)), fresh=(3, 5),
)  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "incarnation", "part"),
    [
        (0, 0, Role.MEMBER),
        (3, 1, Role.MEMBER),  # it enters as it comes
        (3, 0, Role.REPLACED),  # it was declared dead, and another process has its rank
        (5, 2, Role.WAITS),
        (5, 1, Role.REPLACED),
        (6, 0, Role.LEFT),
        (7, 0, Role.LEFT),  # its cell has lost a rank
        (7, 1, Role.REPLACED),  # nobody has welcomed it
    ],
)
def test_each_process_has_one_part(rank, incarnation, part):
    assert part_in(GENERATION, rank, incarnation) is part
    assert concerns(GENERATION, rank, incarnation) == (part in (Role.MEMBER, Role.LEFT))


def test_who_is_left_behind_is_told_what_is_known():
    offer = replace(GENERATION, planned=True, dead=(), why="rank(s) [6] have cost 9.0 s by being slow")
    assert why_without(GENERATION, 6, 0) == (
        "rank(s) [6] were declared dead; the log of the job's host says of which causes, at event=failure_detected"
    ), "it may have been left out"
    assert why_without(GENERATION, 7, 0) == "it was declared dead before, or has left between two steps"
    assert why_without(GENERATION, 3, 0) == "another process has taken its place"
    for rank in (6, 7):  # the reason is not rank 7's, which has left before
        assert why_without(offer, rank, 0) == f"it began between two steps, for this reason: {offer.why}"


@pytest.mark.parametrize("why", ["no route to rank 3", ""])
def test_a_generation_that_does_not_come_is_asked_for(why):
    asked = []

    class Watch:
        settled = True

        def await_newer(self, after, timeout_s):
            return False

        def has(self, names):
            return True

    watch = Watch()
    entering = Entering(
        rank=1, incarnation=0, control=watch, watch=watch, first_within_s=1.0, next_within_s=0.1,
        ask_retry=lambda number, reason: asked.append((number, reason)), fenced=lambda number, why: None,
    )  # fmt: skip
    with pytest.raises(ControlPlaneLost):
        entering.next_generation(4, why=why)
    assert asked == [(4, why or "no newer generation within 0.5 s")]


class StandsStill:
    """Watch and control connection of a rank while the coordinator's process is stopped for ``lasts_s``.

    If the whole job is, the rank is stopped in its wait with it. Otherwise the store does not answer.
    """

    settled = True

    def __init__(self, lasts_s, comes, whole_job):
        self.goes_on_s, self.comes, self.whole_job = time.monotonic() + lasts_s, comes, whole_job

    def await_newer(self, after, timeout_s):
        time.sleep(max(timeout_s, self.goes_on_s - time.monotonic() if self.whole_job else 0.0))
        return self.comes and time.monotonic() > self.goes_on_s + 0.2

    def has(self, names):
        time.sleep(max(self.goes_on_s - time.monotonic(), 0.0))
        return True


@pytest.mark.parametrize("whole_job", [False, True])
@pytest.mark.parametrize("comes", [True, False])
def test_the_time_in_which_the_coordinator_s_process_is_stopped_does_not_count(comes, whole_job, monkeypatch):
    """Nobody else could say what is to be done, and it will. After that time the limit is as ever."""
    monkeypatch.setattr("odyssey_megatron.launch.rank.entering._ASKS_EACH_S", 0.1)
    both = StandsStill(3.0, comes, whole_job)
    entering = Entering(
        rank=1, incarnation=0, control=both, watch=both, first_within_s=1.0, next_within_s=2.0,
        ask_retry=lambda number, reason: None, fenced=lambda number, why: None,
    )  # fmt: skip
    began_s = time.monotonic()
    if comes:
        entering.await_newer(4, "")
    else:
        with pytest.raises(ControlPlaneLost, match=r"no generation after 4 within 2\.0 s"):
            entering.await_newer(4, "")
    assert time.monotonic() - began_s > (3.0 if comes else 5.0)


def joining(connect):
    """What rank 2 hears and enters by, in a process that joins a running job."""
    watch = Watch(
        connect(), lambda text: None, Attention(60.0, 30.0, 0.0), settled=False,
        fallen_everywhere=lambda number, text: True, alone_s=0.0,
    )  # fmt: skip
    entering = Entering(
        rank=2, incarnation=1, control=connect(), watch=watch, first_within_s=1.0, next_within_s=1.0,
        ask_retry=lambda number, reason: None, fenced=lambda number, why: None,
    )  # fmt: skip
    return watch, entering


def test_who_comes_goes_to_the_next_offer_if_the_others_do_not_enter_this_one(connect):
    """One of them could not connect, and declined it."""
    watch, entering = joining(connect)
    coordinator = connect()
    watch.start(1)
    coordinator.put(keys.generation_key(2), f"{keys.OFFER}2")
    assert watch.await_any(1) == (2, "2", True)
    watch.take_offer(2)
    threading.Timer(0.2, lambda: coordinator.put(keys.generation_key(3), f"{keys.OFFER}3")).start()
    with pytest.raises(Superseded):
        entering.await_others(2)
    assert watch.await_any(2) == (3, "3", True)
    watch.take_offer(3)
    coordinator.put(keys.entered_key(3), "")
    entering.await_others(3)


def test_a_generation_that_was_deleted_before_it_was_waited_for_is_not_waited_for_long(connect, monkeypatch):
    monkeypatch.setattr("odyssey_megatron.launch.rank.watch._LOOKS_EACH_S", 0.2)
    watch = Watch(
        connect(), lambda text: None, Attention(60.0, 30.0, 0.0), settled=True,
        fallen_everywhere=lambda number, text: True, alone_s=0.0,
    )  # fmt: skip
    coordinator = connect()
    watch.start(1)
    time.sleep(0.1)  # it waits for the second
    coordinator.put(keys.generation_key(3), "3")
    coordinator.forget_before(3)
    assert watch.await_newer(1, 10.0)
    assert watch.newest() == (3, "3")


def test_who_leaves_with_an_offer_leaves_though_the_others_have_the_next_one(connect):
    """It comes to its boundary last. The others are live in the offered generation by then, and it does not count."""
    heard = threading.Semaphore(0)
    watch = Watch(
        connect(), lambda text: heard.release(), Attention(60.0, 30.0, 0.0), settled=True,
        fallen_everywhere=lambda number, text: True, alone_s=0.0,
    )  # fmt: skip
    coordinator = connect()
    watch.start(1)
    for number in (2, 3):
        coordinator.put(keys.generation_key(number), f"{keys.OFFER}{number}")
        assert heard.acquire(timeout=10.0)
    watch.take_offer(2)
    assert watch.newest() == (2, "2")
    watch.take_offer(3)
    assert watch.newest() == (3, "3")
    watch.take_offer(2)
    assert watch.newest() == (3, "3"), "it is over"


def test_who_stood_still_while_generations_were_forgotten_hears_of_the_one_that_others_are_in(
    connect, monkeypatch
):
    """It waited for the first of them, which has come and is gone when it looks."""
    reached, goes_on, wait = threading.Event(), threading.Event(), Control.wait

    def stands_still(control, names, timeout_s=None):
        wait(control, names, timeout_s)
        if threading.current_thread().name == "odyssey-watch" and not reached.is_set():
            reached.set()
            goes_on.wait(10.0)

    monkeypatch.setattr(Control, "wait", stands_still)
    offers, coordinator = [], connect()
    watch = Watch(
        connect(), offers.append, Attention(60.0, 30.0, 0.0), settled=True,
        fallen_everywhere=lambda number, text: True, alone_s=0.0,
    )  # fmt: skip
    watch.start(1)
    coordinator.put(keys.generation_key(2), "2")
    assert reached.wait(10.0)
    for number, mark in ((3, keys.AGAIN), (4, keys.OFFER)):
        coordinator.put(keys.generation_key(number), f"{mark}{number}")
        coordinator.forget_before(number)
    goes_on.set()
    assert watch.await_newer(1, 10.0)
    assert watch.newest() == (4, "4")
    assert offers == []
    coordinator.store.set(keys.FORGOTTEN, "a stranger's")
    coordinator.put(keys.generation_key(5), f"{keys.OFFER}5")
    coordinator.put(keys.generation_key(6), "6")
    assert watch.await_newer(4, 10.0)
    assert watch.newest() == (6, "6")
    assert offers == ["5"]
