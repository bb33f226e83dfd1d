"""I5: what the survivors make of where they stand."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")


def standing(committed: int, reduced: bool = False):
    from odyssey_megatron.rebuild.agree import Standing

    return Standing(committed=committed, reduced=reduced)


def test_nobody_came_out_of_the_agreement_so_all_do_the_step_again():
    from odyssey_megatron.rebuild.agree import step_to_finish

    assert step_to_finish([standing(4), standing(4, reduced=True), standing(4)]) is None


def test_one_came_out_so_all_finish():
    from odyssey_megatron.rebuild.agree import step_to_finish

    assert step_to_finish([standing(4, reduced=True), standing(5), standing(4, reduced=True)]) == 4


@pytest.mark.parametrize(
    "standings",
    [
        [standing(5), standing(4, reduced=False)],  # it cannot have entered, so nobody can have come out
        [standing(6), standing(4, reduced=True)],  # two steps apart
    ],
)
def test_what_cannot_be_stops_the_job(standings):
    from odyssey_megatron.rebuild.agree import AgreementBroken, step_to_finish

    with pytest.raises(AgreementBroken):
        step_to_finish(standings)


def test_phases_follow_the_table():
    """Every phase but ABORT can be cut short, and the way back into training is the whole way."""
    from odyssey_megatron.recover import NEXT, Phase

    assert all(Phase.ABORT in NEXT[phase] for phase in Phase if phase is not Phase.ABORT)
    path = [Phase.ABORT]
    while path[-1] is not Phase.TRAIN:
        path.append(next(phase for phase in NEXT[path[-1]] if phase is not Phase.ABORT))
    assert path == list(Phase)
    assert all(b in NEXT[a] for a, b in itertools.pairwise(path))
