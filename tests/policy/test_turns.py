"""Decisions, and the thread that works out what the next ones will look up, share a search."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import pytest

from odyssey_megatron.policy.shapes.search import Search
from odyssey_megatron.policy.shapes.turns import Turns
from tests.plan.samples import preset_profile

WORKERS, MICROBATCHES = (23, 22, 21, 20), 48
COSTS = replace(preset_profile("llama2-7b", "h100").costs, memory_bytes=20 * 2**30)


@pytest.fixture
def often():
    """Threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_a_search_that_is_learned_from_answers_as_if_alone(often):
    alone = Search(COSTS, COSTS.memory_bytes, 2)
    expected = {workers: alone.partitions(workers, MICROBATCHES) for workers in WORKERS}
    for _ in range(3):
        search, errors = Search(COSTS, COSTS.memory_bytes, 2), list[Exception]()

        def learn(search=search, errors=errors):
            try:
                for workers in WORKERS:
                    search.partitions(workers, MICROBATCHES, thorough=True)
            except Exception as error:  # noqa: BLE001 - whatever it is
                errors.append(error)

        thread = threading.Thread(target=learn)
        thread.start()
        found = {workers: search.partitions(workers, MICROBATCHES) for workers in WORKERS}
        thread.join()
        assert not errors
        assert found == expected


def test_who_decides_goes_first_and_what_was_begun_is_begun_anew():
    turns, begun, first, done = Turns(), threading.Event(), threading.Event(), []

    def behind():
        begun.set()
        while not first.is_set():
            turns.check()
        done.append("behind")

    thread = threading.Thread(target=lambda: turns.run(behind, yields=True))
    thread.start()
    assert begun.wait(10)
    turns.run(lambda: (turns.run(lambda: done.append("within"), yields=True), first.set()), yields=False)
    thread.join(10)
    assert done == ["within", "behind"]


def test_an_error_gives_the_turn_back():
    turns = Turns()
    with pytest.raises(ValueError, match="no plan"):
        turns.run(lambda: int("no plan"), yields=False)
    assert turns.run(lambda: 7, yields=True) == 7


def test_what_nobody_waits_for_gives_way():
    turns, begun, first, done = Turns(), threading.Event(), threading.Event(), []

    def behind():
        with turns.giving_way():
            assert turns.gives_way
            begun.set()
            while not first.is_set():
                turns.pause()
            turns.pause()
            done.append("behind")
        assert not turns.gives_way

    def decides():
        first.set()
        time.sleep(0.1)
        turns.pause()  # not for itself
        done.append("decides")

    thread = threading.Thread(target=behind)
    thread.start()
    assert begun.wait(10)
    turns.run(decides, yields=False)
    thread.join(10)
    assert done == ["decides", "behind"]
    assert not turns.gives_way
