"""I5: what the survivors make of where they stand."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")


def standing(done: int, ready: bool = False):
    from odyssey_megatron.rebuild.agree import Standing

    return Standing(done=done, ready=ready)


def test_nobody_came_out_of_the_agreement_so_all_do_the_step_again():
    from odyssey_megatron.rebuild.agree import left_behind

    assert not left_behind([standing(4), standing(4, ready=True), standing(4)])


def test_one_came_out_so_all_finish():
    from odyssey_megatron.rebuild.agree import left_behind

    assert left_behind([standing(4, ready=True), standing(5), standing(4, ready=True)])


@pytest.mark.parametrize(
    "standings",
    [
        [standing(5), standing(4, ready=False)],  # it cannot have entered, so nobody can have come out
        [standing(6), standing(4, ready=True)],  # two steps apart
    ],
)
def test_what_cannot_be_stops_the_job(standings):
    from odyssey_megatron.rebuild.agree import AgreementBroken, left_behind

    with pytest.raises(AgreementBroken):
        left_behind(standings)


def test_phases_follow_the_table():
    """Every phase but ABORT can be cut short, and the way back into training is the whole way."""
    from odyssey_megatron.recover import NEXT, Phase

    assert all(Phase.ABORT in NEXT[phase] for phase in Phase if phase is not Phase.ABORT)
    path = [Phase.ABORT]
    while path[-1] is not Phase.TRAIN:
        path.append(next(phase for phase in NEXT[path[-1]] if phase is not Phase.ABORT))
    assert path == list(Phase)
    assert all(b in NEXT[a] for a, b in itertools.pairwise(path))
