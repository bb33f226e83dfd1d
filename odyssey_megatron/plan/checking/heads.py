"""A fast check of all programs up to their first sums (their *heads*), with arrays.

The instructions before the first sum carry out routes: they are most of a program, and take most of the time to verify.
Here they are checked all at once. The answer is yes or unknown: what is wrong, and where, is for
``plan/checking/verify.py`` and ``plan/checking/queue.py`` to find, which go through programs one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.scheduling.visits import (
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
    """What is known of programs that are in order up to their first sums."""

    ends: dict[int, int]
    """Worker -> the length of its head: the position of the first sum, ``STEP``, or other code that is no visit's."""
    summed_later: list[bool]
    """For each visit, whether its weight gradient is not in a head: it comes after a sum, or is done in parts."""
    peaks: dict[int, int]
    """Worker -> the most bytes of activations that it keeps; after the first sum it only frees some."""
    queue: bool
    """Whether all workers are known to reach the ends of their heads with one queue per device
    (``plan/checking/queue.py``).
    """


def heads_in_order(
    visits: Visits, programs: Codes, costs: Costs | None, turns: Sequence[int] | None = None
) -> Heads | None:
    """Return what is known if all heads are in order.

    None: they are not, or it cannot be said here, as with fused backwards and eager forwards.

    Args:
        turns: by code, the turn of each compute instruction in the one order of all from
            ``plan/scheduling/messages.py``. Wrong turns prove nothing, and do no harm.
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
        peaks=_peaks(visits, programs, costs, codes, lengths) if costs else {},
        queue=turns is not None and _one_queue(np.array(turns), codes, seat, ours, theirs),
    )


def _first(found: NDArray[np.bool_]) -> int:
    return int(found.argmax()) if found.any() else len(found)


def _each_in_turn(at: _Numbers, comes: NDArray[np.bool_], goes: NDArray[np.bool_]) -> bool:
    """Whether each visit has all instructions that it must have, in order.

    Args:
        at: [visit, kind] -> the position of the instruction; -1 if there is none.
        comes, goes: for each visit, whether its activation comes from another worker, and its result goes to one.
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
    """The messages of all channels as seen from one end, channel by channel and in order."""

    channel: _Numbers
    place: _Numbers
    """The position of each message's instruction."""
    receive: _Numbers
    """The code of each message's receive."""

    def agree(self, other: _Messages) -> bool:
        """Whether both ends of each channel have the same messages in the same order."""
        return np.array_equal(self.channel, other.channel) and np.array_equal(self.receive, other.receive)


def _messages(codes: _Numbers, owner: _Numbers, visits: Visits, *, sent: bool) -> _Messages:
    """Return all messages that are ``sent``, or else all that are received."""
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
    visits: Visits, programs: Codes, costs: Costs, codes: _Numbers, lengths: Sequence[int]
) -> dict[int, int]:
    """Return the most bytes of activations that each worker keeps.

    No clock is needed for that, since each worker goes through its program in order.
    """
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
    """Whether there is one order of all instructions in which each can begin once all before it have begun.

    A time is given to each instruction: 4 t to a compute instruction with turn t; to a send the time shortly before the
    turn before which its message is through; to a receive the time when all before it in its program have begun, and
    the previous message of its channel has been sent. This is such an order if every program keeps to it, if no message
    is needed before it is sent, and if each receive has begun before the next message of its channel is sent.
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
