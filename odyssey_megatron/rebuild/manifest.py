"""What sender and receiver must have alike before anything is sent: names, shapes and types, in one order.

Messages are bytes. A receiver with less room than is sent would be ended in native code, one whose tensors are others
of the same size would train on with nonsense, and neither would say why.
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
"""By name; the order counts."""

_SHOWN_BYTES = 16384
"""Of each rank's list, where they differ."""


def agree(
    mine: Mapping[int, Tensors],
    places: int,
    group: dist.ProcessGroup,
    *,
    who: str,
    what: Callable[[int], str],
) -> None:
    """All who have something at a place have the same there. Collective over ``group``: one small sum of all places.

    Args:
        mine: by place, in ``range(places)``, of which most concern others.
        who: this rank, as people call it.
        what: says what is at a place.

    Raises:
        TensorsDiffer: on all ranks alike, with the lists.
    """
    lists = {place: _listed(tensors) for place, tensors in mine.items()}
    # The largest and the negative of the smallest digest of a place; where nobody has anything, no digest at all.
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
    """A part of a layer on its way."""

    layer: int
    source: int
    target: int
    """Workers."""
    number: int
    """Among those from the one to the other."""
    place: int
    """Of the cell."""


def agree_on_messages(
    sent: Mapping[Message, Tensors],
    received: Mapping[Message, Tensors],
    group: dist.ProcessGroup,
    *,
    who: str,
    what: Callable[[Message], str],
) -> None:
    """What is sent is what is waited for. Collective over ``group``: one sum of one number, whoever sends how much.

    Each message counts once where it is sent and once, negative, where it is received; a sum of random numbers that is
    zero by chance is one in 2^62.

    Args:
        sent: by this rank, what each message is made of.
        received: by this rank, what each is to fill.
        who: this rank, as people call it.
        what: says what a message is of.

    Raises:
        TensorsDiffer: on all ranks alike, with the lists.
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
    """The messages that are not received as they are sent, ascending, from the ``rows`` of all ranks. Collective."""
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
    """Each rank's ``text``, as far as it is shown. Collective."""
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
