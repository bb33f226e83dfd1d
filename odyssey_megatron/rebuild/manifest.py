"""What sender and receiver must have alike before anything is sent: names, shapes and types, in one order.

Messages are bytes. A receiver with less room than is sent would be ended in native code, one whose tensors are others
of the same size would train on with nonsense, and neither would say why.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping

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
