"""Ranks of one cell meet before any of them holds something, over a real store."""

from __future__ import annotations

import threading
import time

import pytest

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import Fenced
from odyssey_megatron.launch.rank.attention import Attention
from odyssey_megatron.launch.rank.company import Company
from odyssey_megatron.launch.rank.watch import Watch
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control


@pytest.fixture
def begin(connect):
    """A process in the place of a rank of the cell of two: it meets in a thread."""

    control, watches = connect(), list[Watch]()

    def begin(rank: int, incarnation: int) -> Meeting:
        watch = Watch(
            connect(), lambda _: None, Attention(60.0, 30.0, 0.0), settled=False,
            fallen_everywhere=lambda number, text: True, alone_s=0.0,
        )  # fmt: skip
        watches.append(watch)
        company = Company(rank=rank, incarnation=incarnation, control=connect(), watch=watch)
        return Meeting(company, watch)

    begin.control = control
    yield begin
    for watch in watches:
        watch.settled = False
    control.put(keys.here_key(0), "nobody")  # whoever still keeps company with it ends
    for thread in threading.enumerate():
        if thread.name == "odyssey-cell":
            thread.join(5.0)


class Meeting:
    def __init__(self, company: Company, watch: Watch):
        self.watch, self.found = watch, None
        self._thread = threading.Thread(target=self._meet, args=(company,), daemon=True)
        self._thread.start()

    def _meet(self, company: Company) -> None:
        self.found = company.meet(Cell(rank=0, size=2))

    def met(self, within_s: float = 5.0) -> tuple[int, ...] | None:
        self._thread.join(within_s)
        return self.found


def test_a_cell_meets(begin):
    one, other = begin(0, 1), begin(1, 1)
    assert one.met() == other.met() == (1, 1)


def test_who_comes_does_not_meet_one_that_is_about_to_leave(begin):
    """Rank 1 has met rank 0's process of before, so it has to start anew: it may not have seen that yet."""
    first, old = begin(0, 1), begin(1, 1)
    assert first.met() == old.met() == (1, 1)
    old.watch.settled = True  # it sees nothing, as if it were slow to look
    new = begin(0, 2)
    assert new.met(within_s=0.5) is None
    anew = begin(1, 2)
    assert new.met() == anew.met() == (2, 2)


def test_one_that_is_about_to_leave_is_not_met_as_another_takes_its_place(begin, monkeypatch):
    """However long that one takes over what it says first."""
    first, old = begin(0, 1), begin(1, 1)
    assert first.met() == old.met() == (1, 1)
    old.watch.settled = True
    new = begin(0, 2)
    put = Control.put

    def slowly(control: Control, key: str, text: str) -> None:
        put(control, key, text)
        time.sleep(0.3)

    monkeypatch.setattr(Control, "put", slowly)
    anew = begin(1, 2)
    assert new.met() == anew.met() == (2, 2)


@pytest.mark.parametrize("before", [keys.company_key(1), keys.company_key(0)])
def test_nobody_meets_who_was_replaced_while_it_looked(begin, monkeypatch, before):
    """``before``: the look at whom that rank has met takes until the new process of rank 1 has come and looked."""
    first, old = begin(0, 1), begin(1, 1)
    assert first.met() == old.met() == (1, 1)
    old.watch.settled = True
    peek, reached, come = Control.peek, threading.Event(), threading.Event()

    def slowly(control: Control, key: str) -> str | None:
        if key == before and not reached.is_set():
            reached.set()
            come.wait(5.0)
        return peek(control, key)

    monkeypatch.setattr(Control, "peek", slowly)
    new = begin(0, 2)
    assert reached.wait(5.0)
    anew = begin(1, 2)
    time.sleep(0.5)
    come.set()
    assert new.met() == anew.met() == (2, 2)


def test_who_has_met_another_than_is_here_ends(begin):
    first, old = begin(0, 1), begin(1, 1)
    assert first.met() == old.met() == (1, 1)
    begin.control.put(keys.here_key(0), "2")
    with pytest.raises(Fenced, match="has lost another rank of its cell"):
        old.watch.await_newer(0, timeout_s=5)
