"""The memory of layers that move: what is under way at once, and what is kept of it behind that."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.cluster.cell import Cell  # noqa: E402
from odyssey_megatron.plan.plan import Transfer  # noqa: E402
from odyssey_megatron.rebuild import transfer as tested  # noqa: E402

NUMBER, LAYER_BYTES = 12, 4 * 16


class Wire:
    """Instead of ``torch.distributed``: notes the bytes under way, and what still lives of those that were."""

    def __init__(self):
        self.tensors, self.most_bytes = [], {"sent": 0, "received": 0}
        self.ended = 0

    def begin(self, way, flat):
        self.tensors.append((way, weakref.ref(flat)))
        living = [one() for each, one in self.tensors if each == way]
        self.most_bytes[way] = max(self.most_bytes[way], sum(one.nbytes for one in living if one is not None))
        if way == "received":
            flat.zero_()
        return self

    def wait(self):
        self.ended += 1

    def isend(self, flat, rank, **where):
        return self.begin("sent", flat)

    def irecv(self, flat, rank, **where):
        return self.begin("received", flat)


def moved(monkeypatch, room_bytes):
    """Worker 1 sends layers to worker 2, and is sent as many by worker 0, in turn."""
    wire, rooms, came = Wire(), [], []

    def to_fill(layer, part, span):
        rooms.append(weakref.ref(room := torch.ones(16)))
        assert sum(one() is not None for one in rooms) <= 2, "the room of one, and of the one before it"
        return {"weight": room}

    monkeypatch.setattr(tested, "ROOM_BYTES", room_bytes)
    monkeypatch.setattr(tested, "dist", wire)
    monkeypatch.setattr(tested, "agree_on_messages", lambda sent, received, *_, **__: None)
    moving = tested.Moving(
        [Transfer(layer, *way) for layer in range(NUMBER) for way in ((0, 1), (1, 2))],
        num_layers=NUMBER - 2,
        cell=Cell(rank=1),
        world=None,
        ways=lambda one, number: [tested.Way(0, 0, one.target if one.source == 1 else one.source, {})],
        tensors_to_send=lambda layer, part, span: {"weight": torch.full((16,), float(layer))},
        tensors_to_fill=to_fill,
        filled=lambda layer, part, span, tensors: came.append((layer, float(tensors["weight"].sum()))),
        checkpoint=lambda: None,
    )
    assert moving.arriving == set(range(NUMBER)).difference(layer for layer, _ in came)
    moving.finish()
    assert came == [(layer, 0.0) for layer in range(NUMBER)]
    assert not moving.arriving
    assert wire.ended == 2 * NUMBER
    assert all(one() is None for _, one in wire.tensors), "nothing is kept of what has come, or has been sent"
    return wire.most_bytes


@pytest.mark.parametrize(("room", "at_once"), [(0, 1), (8, 4), (2 * NUMBER, NUMBER)])
def test_no_more_is_under_way_than_there_is_room_for(monkeypatch, room, at_once):
    """A half of it for what is sent, and a half for what comes. One message goes even where it has no room."""
    most = moved(monkeypatch, room * LAYER_BYTES)
    assert most == dict.fromkeys(("sent", "received"), at_once * LAYER_BYTES)


def test_room_for_what_comes_is_not_filled_before(monkeypatch):
    """Only what is sent is copied into a message."""
    packed, counted = tested.packed, []
    monkeypatch.setattr(tested, "packed", lambda tensors: counted.append(1) or packed(tensors))
    moved(monkeypatch, 2**20)
    assert len(counted) == NUMBER
