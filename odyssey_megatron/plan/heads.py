"""Whether all that stands before the sums is in order, of all programs at once.

What a program does before its first sum is a part of some route: most of it, and of all that a plan has to be checked
for the most. Here it is taken in numbers, in one go. That says yes or nothing: what is wrong, and where, is for
``plan/verify.py`` and ``plan/queue.py`` to find, which go through the programs one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.visits import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    TO_NEXT,
    TO_PREVIOUS,
    WEIGHT_GRAD,
    Codes,
    Visits,
)

_Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Heads:
    """Of programs that are in order up to their first sums."""

    ends: dict[int, int]
    """Worker -> where its first sum, or ``STEP``, stands."""
    summed_later: list[bool]
    """Of each visit, whether its weight gradient stands behind a sum, or in parts."""
    peaks: dict[int, int]
    """Worker -> the most bytes of activations that it keeps; behind the first sum it only gives some back."""
    queue: bool
    """Whether all come so far, too, where a device has one queue (``plan/queue.py``)."""


def heads_in_order(
    visits: Visits, programs: Codes, costs: Costs | None, turns: Sequence[int] | None = None
) -> Heads | None:
    """None where that is not so, or cannot be said here: of fused backwards, and of what is run ahead.

    Args:
        turns: of each compute instruction, in the one order of all that ``plan/messages.py`` has found; a bad one is
            no proof, and does no harm.
    """
    before, behind = np.array(visits.before), np.array(visits.behind)
    whole = [np.array(program, dtype=np.int64) for program in programs.values()]
    heads = [program[: _first(program >= visits.reductions)] for program in whole]
    lengths = [len(head) for head in heads]
    if not sum(lengths):
        return None
    codes, seat = np.concatenate(heads), np.repeat(np.arange(len(heads)), lengths)
    workers = np.array([*programs], dtype=np.int64)
    owner = workers[seat]
    if (
        np.bincount(codes, minlength=visits.reductions).max() > 1
        or (np.array(visits.worker)[codes >> 3] != owner).any()
    ):
        return None
    place = np.full(visits.reductions, -1)
    place[codes] = np.arange(len(codes))
    at = place.reshape(-1, 8)
    ours, theirs = _messages(codes, owner, visits, sent=True), _messages(codes, owner, visits, sent=False)
    if not (_each_in_turn(at, before >= 0, behind >= 0) and ours.agree(theirs)):
        return None
    return Heads(
        ends=dict(zip(programs, lengths, strict=True)),
        summed_later=(at[:, WEIGHT_GRAD] < 0).tolist(),
        peaks=_peaks(visits, programs, costs, codes, seat, lengths) if costs else {},
        queue=turns is not None and _one_queue(np.array(turns), codes, seat, ours, theirs),
    )


def _first(found: NDArray[np.bool_]) -> int:
    return int(found.argmax()) if found.any() else len(found)


def _each_in_turn(at: _Numbers, comes: NDArray[np.bool_], goes: NDArray[np.bool_]) -> bool:
    """Each visit has what it is to have, once, and in order: ``at`` is where each kind stands, -1 where it does not.

    Args:
        comes, goes: of each visit, whether its activation comes from somebody, and goes to somebody.
    """
    forward, input_grad, weight_grad = at[:, FORWARD], at[:, INPUT_GRAD], at[:, WEIGHT_GRAD]
    there = at >= 0
    has_all = (
        there[:, FORWARD].all()
        and there[:, INPUT_GRAD].all()
        and not there[:, BACKWARD].any()
        and (there[:, RECV_FORWARD] == comes).all()
        and (there[:, SEND_BACKWARD] == comes).all()
        and (there[:, SEND_FORWARD] == goes).all()
        and (there[:, RECV_BACKWARD] == goes).all()
    )
    return bool(
        has_all
        and (forward > at[:, RECV_FORWARD]).all()
        and (input_grad > forward).all()
        and (input_grad > at[:, RECV_BACKWARD]).all()
        and ((weight_grad > input_grad) | (weight_grad < 0)).all()
        and (at[:, SEND_FORWARD] > forward)[goes].all()
        and (at[:, SEND_BACKWARD] > input_grad)[comes].all()
    )


class _Messages(NamedTuple):
    """Channel by channel, and in order."""

    channel: _Numbers
    place: _Numbers
    """Where the instruction stands."""
    receive: _Numbers
    """The code of the receive."""

    def agree(self, other: _Messages) -> bool:
        """Both ends of each channel name the same messages in the same order."""
        return np.array_equal(self.channel, other.channel) and np.array_equal(self.receive, other.receive)


def _messages(codes: _Numbers, owner: _Numbers, visits: Visits, *, sent: bool) -> _Messages:
    """All that are sent, or all that are received."""
    down_kind, up_kind = (SEND_FORWARD, SEND_BACKWARD) if sent else (RECV_BACKWARD, RECV_FORWARD)
    kind = codes & 7
    place = np.flatnonzero((kind == down_kind) | (kind == up_kind))
    own, down, ours = codes[place], kind[place] == down_kind, owner[place]
    peer = np.where(down, np.array(visits.behind)[own >> 3], np.array(visits.before)[own >> 3])
    receive = np.where(down, own + TO_NEXT, own + TO_PREVIOUS) if sent else own
    sender, receiver = (ours, peer) if sent else (peer, ours)
    channel = sender * (max(visits.worker) + 1) + receiver
    order = np.argsort(channel, kind="stable")
    return _Messages(channel[order], place[order], receive[order])


def _peaks(
    visits: Visits, programs: Codes, costs: Costs, codes: _Numbers, seat: _Numbers, lengths: Sequence[int]
) -> dict[int, int]:
    """Each worker goes through its program in order, so that no clock is needed for this."""
    spans = costs.spans
    places = list(zip(visits.first, visits.last, strict=True))
    bytes_of = {one: (spans.activation_bytes(*one), spans.early_bytes(*one)) for one in {*places}}
    kept, early = np.array([bytes_of[one] for one in places], dtype=np.int64).T
    sizes = np.zeros((len(places), 8), dtype=np.int64)
    sizes[:, FORWARD], sizes[:, INPUT_GRAD], sizes[:, WEIGHT_GRAD] = kept, -early, early - kept
    live = sizes.reshape(-1)[codes]
    starts = np.cumsum([0, *lengths])
    return {
        worker: int(np.cumsum(live[a:b]).max(initial=0))
        for worker, a, b in zip(programs, starts[:-1], starts[1:], strict=True)
    }


def _one_queue(
    turns: _Numbers, codes: _Numbers, seat: _Numbers, sent: _Messages, received: _Messages
) -> bool:
    """Whether there is one order of all instructions in which each can begin once all before it have.

    A compute instruction begins in its turn t, at 4 t; what is sent shortly before the turn before which it is through;
    a receive when all before it in its program have begun, and behind the message ahead of its own. That is such an
    order if it is that of every program, if nobody needs anything before it is sent, and if each receive has
    begun before the message behind its own is sent.
    """
    kind = codes & 7
    receives = (kind == RECV_FORWARD) | (kind == RECV_BACKWARD)
    when = 4 * turns[codes]
    when[sent.place] = 4 * turns[sent.receive] - 2
    when[receives] = -1
    follows = np.flatnonzero(sent.channel[1:] == sent.channel[:-1]) + 1
    when[received.place[follows]] = when[sent.place[follows - 1]] + 1
    longest = 4 * int(turns.max()) + 8
    begins = np.maximum.accumulate(when + seat * longest) - seat * longest
    needs = received.receive
    consumer = np.where(needs & 7 == RECV_FORWARD, needs - RECV_FORWARD, needs - RECV_BACKWARD + INPUT_GRAD)
    return bool(
        (when[~receives] >= 0).all()
        and (begins == when)[~receives].all()
        and (4 * turns[consumer] > when[sent.place]).all()
        and (begins[received.place[follows - 1]] < when[sent.place[follows]]).all()
    )
