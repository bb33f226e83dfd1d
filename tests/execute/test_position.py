"""How far a rank is: of each piece of common work it has had its part, or has finished it by itself."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from odyssey_megatron.execute.position import CommonWork, Position
from odyssey_megatron.execute.votes import NUM_VOTES, Ballot, Votes
from odyssey_megatron.rebuild.agree import left_behind


def test_whoever_is_ready_finishes_what_another_one_is_through_with():
    ahead, behind = Position(0, 4), Position(0, 4)
    for one in (ahead, behind):
        one.begin()
        one.complete = CommonWork.STEP
    ahead.commit(torch.ones(4, dtype=torch.float64))
    assert left_behind([ahead.standing(), behind.standing()])
    behind.commit(ahead.totals)
    assert ahead.standing() == behind.standing()
    assert not left_behind([ahead.standing(), behind.standing()])
    assert (behind.committed, behind.done, behind.own) == (1, 1, 1)


def test_one_that_joins_is_as_far_as_the_others_but_has_had_no_part():
    old, new = Position(0, 4), Position(0, 4)
    for _ in range(3):
        old.begin()
        old.commit(torch.full((4,), 2.0, dtype=torch.float64))
    old.finish()
    new.joins = True
    new.take_over(old.standing(), old.totals)
    assert new.standing() == old.standing()
    assert torch.equal(new.totals, old.totals)
    assert (old.own, new.own) == (4, 0)


def test_votes_ride_behind_the_models_totals():
    ballot = Ballot(wants_end=lambda: True, prepared=lambda: (7, 49))
    own = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    totals = ballot.cast(own, torch.tensor(5.0, dtype=torch.float64))
    assert torch.equal(totals[:-NUM_VOTES], own)
    assert Votes.of(totals) == Votes(end=1.0, writing=0.0, ballots=7.0, squares=49.0, missing=5.0)
    ballot.writes = lambda: True
    assert Votes.of(2 * ballot.cast(own, torch.zeros((), dtype=torch.float64))).writing == 2.0
