"""What of an activation goes from which rank to which, between cells of any two sizes: all of it, once."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.execute import channels
from odyssey_megatron.execute.channels import Channels
from odyssey_megatron.mcore.contexts import places
from odyssey_megatron.plan.schedule import Instr, Op

WHOLE = torch.arange(48.0 * 3).view(48, 1, 3)


class Post:
    """Carries messages within this process: sizes are tried that no job of the tests has."""

    def __init__(self, rank: int, messages: dict):
        self._rank, self._messages = rank, messages

    def isend(self, message, rank, **where):
        key = self._rank, rank, where["tag"]
        assert key not in self._messages, "sent twice"
        self._messages[key] = message.clone()
        return self

    def irecv(self, room, rank, **where):
        room.view(-1).copy_(self._messages.pop((rank, self._rank, where["tag"])).view(-1))
        return self

    def wait(self) -> None: ...


def of_rank(cell: Cell, *, cuts: bool) -> torch.Tensor:
    """Of the whole sequence, as Megatron cuts it."""
    own = WHOLE[places(torch.tensor([0, len(WHOLE)]), len(WHOLE), cell.context, cell.context_rank)]
    return own.unflatten(0, (cell.tensor, -1))[cell.tensor_rank] if cuts else own


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("word", [None, torch.tensor(1.0)])
@pytest.mark.parametrize(("tensor", "context"), [(6, 1), (1, 6), (2, 4), (4, 2), (3, 2), (2, 3)])
def test_each_rank_gets_its_piece(monkeypatch, tensor, context, word, cuts):
    whole = Cell.of(0, tensor=tensor, context=context)
    for ours, theirs in product(whole.divisions(tensor=True), repeat=2):
        send_and_receive(
            monkeypatch, whole, {0: whole.size // ours, 1: whole.size // theirs}, word, cuts=cuts
        )


def send_and_receive(monkeypatch, whole, shapes, word, *, cuts):
    ends, messages = {}, {}
    for worker, size in shapes.items():
        for cell in whole.of_worker(worker, size):
            made = Channels({"world": None}, cells=Cells(cell, shapes), num_layers=4, tagged=True, cuts=cuts)
            ends[cell.rank] = worker, made, of_rank(cell, cuts=cuts)
    for rank, (worker, made, piece) in ends.items():
        monkeypatch.setattr(channels, "dist", Post(rank, messages))
        if worker == 0:
            made.send(Instr(Op.SEND_FORWARD, 3, 2, peer=1), piece, word)
    for rank, (worker, made, piece) in ends.items():
        monkeypatch.setattr(channels, "dist", Post(rank, messages))
        if worker == 1:
            room = torch.full_like(piece, torch.nan)
            pending = made.receive(Instr(Op.RECV_FORWARD, 3, 2, peer=0), room, with_word=word is not None)
            tensor, said = pending.wait()
            assert torch.equal(tensor, piece)
            assert said is None if word is None else said.item() == 1.0
    assert not messages, "all that was sent is received"


def test_what_counts_for_nothing_anywhere_does_not_count(monkeypatch):
    messages = {}
    for rank in (0, 1):
        cell = Cell.of(rank, tensor=2)
        made = Channels({"world": None}, cells=Cells(cell, {1: 1}), num_layers=4, tagged=True, cuts=True)
        monkeypatch.setattr(channels, "dist", Post(rank, messages))
        made.send(Instr(Op.SEND_FORWARD, 0, 2, peer=1), torch.ones(2, 1), torch.tensor(float(rank)))
    monkeypatch.setattr(channels, "dist", Post(2, messages))
    cell = Cell.of(2, tensor=2).smaller(1)
    made = Channels({"world": None}, cells=Cells(cell, {1: 1}), num_layers=4, tagged=True, cuts=True)
    pending = made.receive(Instr(Op.RECV_FORWARD, 0, 2, peer=0), torch.zeros(4, 1), with_word=True)
    assert pending.wait()[1].item() == 0.0
