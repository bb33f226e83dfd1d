"""Offered generations are prepared behind the steps, while others may come and go."""

from __future__ import annotations

import threading
import time

import pytest

from odyssey_megatron.errors import PeerFailed, Superseded
from odyssey_megatron.execute.prepare import Offers


class Groups:
    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def declined():
    return []


@pytest.fixture
def offers(declined):
    return Offers(lambda number, why: declined.append((number, why)))


def ready(offers, number):
    ends_s = time.monotonic() + 5
    while offers.ballot() != (number, number**2):
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def fail(error):
    raise error


def test_an_offer_outlives_a_generation_that_came_before_it_and_is_entered_later(offers):
    groups = Groups()
    offers.prepare(15, lambda: groups)
    assert offers.take(14) is None
    ready(offers, 15)
    assert offers.take(15) is groups
    assert not groups.closed


def test_an_offer_that_a_generation_has_ended_is_closed(offers):
    groups = Groups()
    offers.prepare(13, lambda: groups)
    ready(offers, 13)
    assert offers.take(14) is None
    assert groups.closed
    assert offers.ballot() == (0, 0)


def test_who_enters_what_is_being_prepared_waits_for_it(offers):
    """It would meet its peers under the same names as its other thread."""
    groups, goes_on = Groups(), threading.Event()

    def build():
        goes_on.wait(5)
        return groups

    offers.prepare(15, build)
    threading.Timer(0.1, goes_on.set).start()
    assert offers.take(15) is groups


def test_what_a_rank_enters_by_itself_is_not_prepared_once_more(offers):
    assert offers.take(15) is None
    offers.prepare(15, lambda: pytest.fail("built twice"))
    assert offers.ballot() == (0, 0)


@pytest.mark.parametrize(
    "error", [PeerFailed("no address"), Superseded("over"), OSError("no socket is left")]
)
def test_what_cannot_be_built_is_declined(offers, declined, error):
    offers.prepare(15, lambda: fail(error))
    with pytest.raises(type(error)):
        offers.take(15)
    assert declined == ([] if isinstance(error, Superseded) else [(15, str(error))])


def test_what_is_dropped_while_it_is_built_is_closed_behind_it(offers):
    groups, goes_on = Groups(), threading.Event()

    def build():
        goes_on.wait(5)
        return groups

    offers.prepare(13, build)
    assert offers.take(14) is None
    goes_on.set()
    ends_s = time.monotonic() + 5
    while not groups.closed:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
