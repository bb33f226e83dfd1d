"""Plans that change between steps, under the rules of CUDA and NCCL: ranks that come back, layers that move behind the
steps, a node that leaves. Groups of what is on offer are connected by threads, beside steps and recoveries.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.plan.placing.groups import passes  # noqa: E402
from odyssey_megatron.rebuild import transfer  # noqa: E402
from tests.strict.cases import KINDS, TIGHT, changing  # noqa: E402
from tests.strict.checking import check  # noqa: E402
from tests.strict.job import Kill  # noqa: E402


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "seed"), [*zip(KINDS, (0, 0, 0, 1), strict=True)])
def test_a_plan_begins_between_two_steps(kind, seed):
    """In time, by these seeds."""
    ended = check(changing(kind, 0), seed)
    offered = [one for one in ended.entered if one.planned]
    assert offered
    assert any(one.plan.transfers for one in offered), "layers move behind a step"
    if kind in ("come back", "leave"):
        assert len(ended.entered[-1].members) == len(ended.case.ranks), "all are back"


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_what_both_plans_have_use_for_is_not_connected_anew(kind):
    """Nobody in it has died. What is connected is what decisions and the doctor count."""
    told = check(changing(kind, 0), seed=1).all_told_anew
    assert len(told) > 1
    assert all(connected == said for connected, said in told.values()), told


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_had_its_use_is_ended(kind):
    """By what layers moved, after a loss or behind a step, and by what links were timed: plans count on its memory."""
    ended = check(changing(kind, 0), seed=1)
    told = ended.all_told_lasting
    assert len(told) > 1
    assert all(has == said for has, said in told.values()), told
    names = {name for one in told for name in ended.connected(one)}
    assert any(map(passes, names))


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "generation", "rank"), [("two speeds", 4, 2), ("come back", 4, 1)])
def test_a_failure_as_a_plan_begins_falls_back_on_what_is_there(kind, generation, rank):
    """Some have taken communicators over, and others have not: all that were there are there for the recovery."""
    one, died = changing(kind, 0), Kill(rank=rank, step=-1, point="groups", generation=generation)
    ended = check(replace(one, kills=(*one.kills, died)), seed=1)
    assert not ended.generations[generation].planned
    connected, told = ended.told_anew(generation + 1, before=generation - 1)
    assert connected == told


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "number", "copies"), [("come back", 4, 0), ("two speeds", 1, 0), ("move", 1, 2)]
)
def test_killed_on_the_way(kind, number, copies):
    one = changing(kind, number, copies=copies)
    ended = check(replace(one, **TIGHT), seed=1)
    assert len(ended.struck) == len(one.kills)


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("kind", ["come back", "move"])
def test_layers_move_one_at_a_time_where_memory_is_short(kind, copies, monkeypatch):
    """Each rank waits for its oldest message before it begins another, and none waits in a circle."""
    most, waits, add = [], [], transfer._OneWay.add
    make_room = transfer._OneWay.make_room

    def makes(self, *args):
        before = len(self.under_way)
        make_room(self, *args)
        waits.append(before - len(self.under_way))

    def adds(self, *args):
        add(self, *args)
        most.append(len(self.under_way))

    monkeypatch.setattr(transfer._OneWay, "make_room", makes)
    monkeypatch.setattr(transfer._OneWay, "add", adds)
    monkeypatch.setattr(transfer, "ROOM_BYTES", 0)
    check(changing(kind, 0, copies=copies), seed=1)
    assert set(most) == {1}
    assert any(waits)


def test_whoever_prepares_an_offer_takes_nothing_that_a_recovery_counts_on():
    """A rank dies as it connects what is on offer: the thread that prepares it, and the one that recovers, look for
    communicators that have outlived the generation at once.
    """
    for seed in (300, 301):
        assert len(check(changing("two speeds", 3), seed).struck) == 2


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(5))
def test_killed_anywhere(part, kind, copies):
    for number in range(part, 50, 5):
        for seed in range(2):
            one = changing(kind, number, copies=copies)
            check(replace(one, **(TIGHT if seed else {})), seed=100 * number + seed)
