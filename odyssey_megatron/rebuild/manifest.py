"""Check, before anything is sent, that senders and receivers have the same tensors: names, shapes, types and order.

Messages are bytes. A receiver with less room than is sent would be ended in native code. A receiver with other tensors
of the same total size would train on with nonsense. Neither would say why.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from odyssey_megatron.errors import TensorsDiffer

Tensors = Mapping[str, torch.Tensor]
"""Tensors by name. The order counts."""

_SHOWN_BYTES = 16384
"""How much of each rank's list of tensors is shown when the lists differ."""


def agree(
    mine: Mapping[int, Tensors],
    places: int,
    group: dist.ProcessGroup,
    *,
    who: str,
    what: Callable[[int], str],
) -> None:
    """Check that all ranks with tensors at a place have the same there. Collective over ``group`` (one all-reduce).

    Args:
        mine: The tensors of this rank by place, a number in ``range(places)``. Most places concern other ranks only.
        who: What people call this rank.
        what: Says what is at a place.

    Raises:
        TensorsDiffer: On all ranks alike, with the lists.
    """
    lists = {place: _listed(tensors) for place, tensors in mine.items()}
    # One maximum gives the largest digest of each place and, from the complement, the smallest. Where nobody has
    # anything, both stay -1.
    extremes = torch.full((2, places), -1, dtype=torch.int64)
    for place, one in lists.items():
        value = _digest(one)
        extremes[:, place] = torch.tensor([value, _LARGEST - value])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes[0], _LARGEST - extremes[1]
    differing = torch.nonzero((largest >= 0) & (largest != smallest)).flatten().tolist()
    if differing:
        said = lists.get(differing[0], "")
        found = _gathered(f"{who}\n{said}" if said else "", group)
        raise TensorsDiffer(_said(what(differing[0]), found, len(differing)))


class Message(NamedTuple):
    """The identity of a message: one part of a layer, from worker ``source`` to worker ``target``."""

    layer: int
    source: int
    target: int
    """A worker, like ``source``."""
    number: int
    """The number of the transfer among those from ``source`` to ``target``."""
    slot: int
    """``rebuild.transfer.Way.slot``."""


def agree_on_messages(
    sent: Mapping[Message, Tensors],
    received: Mapping[Message, Tensors],
    group: dist.ProcessGroup,
    *,
    who: str,
    what: Callable[[Message], str],
) -> None:
    """Check that the messages sent are those that are waited for. Collective over ``group``.

    It sums a single number, however much is sent: the digest of each message counts once where it is sent, and once,
    negative, where it is received. That digests which differ sum to zero by chance has a probability of one in 2^62.

    Args:
        sent: The tensors of each message that this rank sends.
        received: The tensors that each message to this rank is to fill.
        who: What people call this rank.
        what: Says what a message contains.

    Raises:
        TensorsDiffer: On all ranks alike, with the lists.
    """
    rows = [(one, _digest(f"{one}\n{_listed(tensors)}")) for one, tensors in sent.items()]
    rows += [(one, -_digest(f"{one}\n{_listed(tensors)}")) for one, tensors in received.items()]
    total = torch.tensor([sum(value for _, value in rows) % _LARGEST])
    dist.all_reduce(total, group=group)
    if not total.item() % _LARGEST:
        return
    differing = _differing(rows, group)
    first = differing[0]
    tensors = sent.get(first, received.get(first))
    found = _gathered("" if tensors is None else f"{who}\n{_listed(tensors)}", group)
    raise TensorsDiffer(_said(what(first), found, len(differing)))


def _differing(rows: list[tuple[Message, int]], group: dist.ProcessGroup) -> list[Message]:
    """Return the messages that are not received as they are sent, ascending, from all ranks' ``rows``. Collective."""
    most = torch.tensor([len(rows)])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    mine = torch.zeros((int(most), len(Message._fields) + 1), dtype=torch.int64)
    if rows:
        mine[: len(rows)] = torch.tensor([(*message, value) for message, value in rows])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    total: dict[Message, int] = defaultdict(int)
    for *message, value in torch.cat(everyone).tolist():
        total[Message(*message)] += value
    return sorted(message for message, value in total.items() if value)


_LARGEST = 2**62


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _listed(tensors: Tensors) -> str:
    return "\n".join(
        f"{name} {str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for name, one in tensors.items()
    )


def _gathered(text: str, group: dist.ProcessGroup) -> list[str]:
    """Return each rank's ``text``, cut to ``_SHOWN_BYTES``. Collective."""
    mine = torch.zeros(_SHOWN_BYTES, dtype=torch.uint8)
    said = text.encode()[:_SHOWN_BYTES]
    mine[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in everyone]


def _said(what: str, found: list[str], places: int) -> str:
    whose: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for text in filter(None, found):
        who, *differing = text.split("\n")
        whose[tuple(differing)].append(who)
    common = set.intersection(*map(set, whose))
    said = []
    for lines, ranks in whose.items():
        own = [line for line in lines if line not in common]
        besides = f"{len(common)} that all have and " if own and common else ""
        said.append(f"{', '.join(ranks)}: {besides}{'; '.join(own or lines)}")
    more = f" ({places - 1} more like it)" if places > 1 else ""
    return (
        f"the ranks do not agree on what there is of {what}{more}, and nothing was sent. {'. '.join(said)}. "
        "Ranks that were started alike build alike layers: compare their versions of Megatron, of Transformer Engine "
        "or Apex, and their flags. Otherwise this is a bug: please report it with the journal."
    )
