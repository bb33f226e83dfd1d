"""Work is done when this rank has had its part in it, whatever the others do meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from odyssey_megatron.errors import PeerFailed, Superseded
from odyssey_megatron.recover import Phase, Recovery


class Control:
    def __init__(self) -> None:
        self.number = 0
        self.whys: list[str] = []

    def next_generation(self, after: int, *, why: str = "") -> Any:
        self.whys.append(why)
        self.number = after + 1
        return type("Generation", (), {"number": self.number})()

    def report_live(self, number: int, done: int) -> None:
        pass


class Rank:
    """Joins a job whose other ranks have committed :attr:`ahead` steps when it enters a generation."""

    def __init__(self, ahead: list[int], fails_in: set[int]):
        self.ahead, self.fails_in = ahead, fails_in
        self.committed = self.done = self.own = self.boundary = 0
        self.ran: list[int] = []

    is_over = False

    def enter_phase(self, phase: Phase) -> None:
        pass

    def abort(self, why: Exception) -> None:
        pass

    def build_groups(self, generation: Any) -> None:
        pass

    def transfer(self, generation: Any, live: Any) -> None:
        live()

    def agree(self, generation: Any) -> None:
        self.committed = self.ahead[generation.number - 1]

    def run_step(self, generation: Any) -> None:
        self.ran.append(self.committed)
        if generation.number in self.fails_in:
            raise Superseded("somebody died")
        self.committed, self.own = self.committed + 1, self.own + 1

    def together(self, work: Any) -> None:
        if self.own in self.fails_in:
            self.fails_in.remove(self.own)
            self.own += 1  # what it has done is found complete when the next generation begins
            work(None)
            raise Superseded("somebody died")
        work(None)
        self.own += 1


@pytest.mark.parametrize("fails_in", [set(), {1}, {1, 2}])
def test_a_rank_that_is_asked_again_runs_a_step_that_it_is_let_into(fails_in):
    rank = Rank([4, 9, 9], fails_in)
    Recovery(Control(), rank).step()
    assert rank.own == 1
    assert rank.ran == [4, 9, 9][: len(fails_in) + 1]
    assert rank.committed == rank.ran[-1] + 1


def test_work_that_others_have_completed_has_its_result():
    rank = Rank([4, 4], {0})
    assert Recovery(Control(), rank).together(lambda world: "result") == "result"
    assert rank.own == 1


def test_whoever_asks_for_a_generation_says_what_went_wrong():
    control, rank, failures = (
        Control(),
        Rank([4] * 4, set()),
        [PeerFailed("no route to rank 3"), Superseded("newer")],
    )

    def work(generation: Any) -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    assert Recovery(control, rank).carry_out(work) == "done"
    assert control.whys == ["", "no route to rank 3", ""]
