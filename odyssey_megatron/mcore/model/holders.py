"""Checks that all holders of a layer have the same bytes, which every way of recovery relies on.

Does what Megatron's ``check_param_hashes_across_dp_replicas`` (``megatron/core/utils.py``) does for its data-parallel
groups, but for any set of holders, and for the optimizer state that they keep, too.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from odyssey_megatron.errors import HoldersDiffer
from odyssey_megatron.execute.left_out import dispensable
from odyssey_megatron.mcore.model.layers import HeldLayer
from odyssey_megatron.mcore.model.parts import Parts
from odyssey_megatron.names import layer_name
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import Span, kept
from odyssey_megatron.plan.placing.stretches import DENSE, Stretches

Digests = Mapping[tuple[int, Span | None], bytes]
"""(layer, span of its optimizer state, or None for its weights) -> the digest."""
Row = tuple[int, int, Mapping[tuple[int, Span | None], int]]
"""A rank's number, the number of a part, and the first 64 bits of the digests of what the rank has in that part."""
NOTHING, UNLIKE = -1, -2
"""Values that the first 64 bits of a digest are assumed never to have. NOTHING: the rank has nothing there. UNLIKE: a
worker's own ranks differ.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A piece of the model that is not the same on all its holders."""

    layer: int
    span: Span | None
    """The span of the layer's optimizer state; None: the weights."""
    kind: str
    """What differs, in words."""
    alike: Mapping[int, tuple[int, ...]]
    """First 64 bits of the digest -> the ranks that have this digest."""

    def said(self, num_layers: int) -> str:
        """The difference in words; the largest group of ranks comes first."""
        groups = sorted(self.alike.values(), key=len, reverse=True)
        where = " and on ".join(str(list(ranks)) for ranks in groups)
        return f"{self.kind} of {layer_name(self.layer, num_layers)} on ranks {where}"


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """The SHA-256 of the bytes of ``tensors``."""
    result = hashlib.sha256()
    for tensor in tensors:  # a copy: storage that is shared with NumPy could never be freed (Parking)
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        result.update(copy.reshape(-1).view(torch.uint8).numpy().data)
    return result.digest()


def digests(
    layers: Iterable[HeldLayer], parts: Parts, own: Stretches, *, with_stepped: bool = False
) -> list[dict[tuple[int, Span | None], bytes]]:
    """For each of ``parts``, the digests of the weights of each layer and of the optimizer state that is kept here, in
    spans that other ranks may keep, too; ``with_stepped``: of that together with the weights that are stepped by it. At
    the end those of a gang's optimizer state besides experts: ranks that have the same of that may have no part in
    common.
    """
    *found, all_but = [dict[tuple[int, Span | None], bytes]() for _ in (*parts, None)]
    for layer in layers:
        for part, result in zip(parts, found, strict=True):
            result[layer.index, None] = digest(parts.of(layer, layer.weights(), part).values())
        if layer.optimizer is not None:
            with layer.optimizer.at_hand():
                numbers = layer.optimizer.stepped if with_stepped else layer.optimizer.numbers
                for span in own.apart(layer.optimizer.spans):
                    is_dense = DENSE[0] <= span[0] < DENSE[1]
                    for number, result in enumerate([all_but] if is_dense else found):
                        result[layer.index, span] = digest(numbers(number, span).values())
    return [*found, all_but]


def odd_ones(
    mine: Mapping[int, Digests],
    group: dist.ProcessGroup,
    *,
    rank: int,
    cell_size: int,
    layout: Layout,
    stretches: Stretches,
) -> dict[int, str]:
    """Worker -> how its state differs from the other holders'; empty if all holders of each layer have the same.

    Collective over ``group``, all ranks of the job.

    Args:
        mine: this rank's digests, by the number of what they are of: ranks with the same of it have the same number,
            and a rank of a smaller cell has several parts.
        rank: this rank's number in the job.
        cell_size: number of ranks of a whole worker.
        stretches: those of this rank; other ranks may have others of as many.

    Raises:
        HoldersDiffer: on every rank alike, if it is unclear who is right.
    """
    num_layers = layout.num_layers
    most = torch.tensor(len(mine))
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    # For each layer a column for its weights, and one for each slice that a worker may keep; the layout says which
    # slices they are.
    width = 1 + max(layout.copies, 1) * stretches.most
    table = torch.full((int(most), 2 + len(layout.all_holders) * width), NOTHING, dtype=torch.int64)
    own = _kinds(layout, rank // cell_size, stretches)
    for row, (part, digests_of_it) in zip(table, mine.items(), strict=False):
        row[:2] = torch.tensor([rank, part])
        for (layer, span), value in digests_of_it.items():
            row[2 + layer * width + own[layer].index(span)] = int.from_bytes(value[:8], "big", signed=True)
    tables = [torch.empty_like(table) for _ in range(group.size())]
    dist.all_gather(tables, table, group=group)
    rows = []
    for number, part, *values in (row for one in tables for row in one.tolist()):
        of_worker = enumerate(_kinds(layout, number // cell_size, stretches) if number >= 0 else ())
        places = {
            (layer, span): values[layer * width + at]
            for layer, kinds in of_worker
            for at, span in enumerate(kinds)
        }
        rows.append((number, part, places))
    found = differences(rows, "weights or optimizer state" if layout.keepers else "optimizer state")
    odd = decided(found, layout, cell_size, shares=stretches.shares_out)
    if odd is None:
        said = [one.said(num_layers) for one in found]
        raise HoldersDiffer(
            f"{len(said)} part(s) of the model differ between their holders: {'; '.join(said[:4])}"
            f"{'; ...' if said[4:] else ''}. Hardware that computes wrongly, or a bug: please report it with the "
            "journal. Restart from a checkpoint before it, without the ranks that are alone with what they have."
        )
    return odd


def _kinds(layout: Layout, worker: int, stretches: Stretches) -> list[list[Span | None]]:
    """For each layer, what ranks of ``worker`` may have of it: the weights (None), and the spans of optimizer state."""
    return [[None, *stretches.every(kept(found).get(worker, ()))] for found in layout.states]


def differences(rows: Iterable[Row], kept: str = "optimizer state") -> list[Difference]:
    """The pieces that are not the same everywhere; the weights of a layer come first, then its slices in order.

    ``kept``: what the digests of spans are of, in words.
    """
    holders: dict[tuple[int, Span, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, shard, digests in rows:
        for (layer, span), value in digests.items():
            if value != NOTHING:
                holders[layer, span or _WEIGHTS, shard][value].append(rank)
    return [
        Difference(
            layer=layer,
            span=None if span == _WEIGHTS else span,
            kind="weights" if span == _WEIGHTS else kept,
            alike={value: tuple(sorted(ranks)) for value, ranks in alike.items()},
        )
        for (layer, span, _), alike in sorted(holders.items())
        if len(alike) > 1
    ]


_WEIGHTS: Span = (-1, -1)
"""Stands for the weights in place of a span, so that they are sorted first."""


def decided(
    found: Sequence[Difference], layout: Layout, cell_size: int, *, shares: bool = False
) -> dict[int, str] | None:
    """Worker -> how its state differs from that of those who are right.

    Right is what more than half, and at least two, of those holders have that make the step by themselves. With the
    distributed optimizer, weights that others have stepped are no second opinion on it: where the owners of a layer's
    slices differ, in weights or state, and it is clear which of them is wrong, the other holders will be sent right
    weights again. Where the owners agree, weights were changed after they were sent, and most holders have the right
    ones. A worker whose own ranks differ has nothing that is right; but where they share out the state (``shares``),
    and so send each other weights, somebody else's wrong ones make them differ.

    Returns:
        None if it is unclear for any difference who is right, or if nobody who is right would be left for some layer.
    """
    stepped_wrongly = {one.layer for one in found if one.span is not None} if layout.keepers else set()
    odd: dict[int, str] = {}
    for one in found:
        having: dict[int, int] = {}
        for value, ranks in one.alike.items():
            for worker in {rank // cell_size for rank in ranks}:
                having[worker] = UNLIKE if worker in having else value
        if one.span is None and one.layer in stepped_wrongly:
            unlike = [worker for worker, value in having.items() if value == UNLIKE and not shares]
            odd |= {worker: _said(one, UNLIKE, 0, layout.num_layers) for worker in sorted(unlike)}
            continue
        keepers = [worker for worker in layout.all_holders[one.layer] if worker in having]
        counted = Counter(having[worker] for worker in keepers if having[worker] != UNLIKE)
        right, votes = max(counted.items(), key=lambda item: item[1], default=(UNLIKE, 0))
        if votes < 2 or 2 * votes <= len(keepers):
            return None
        for worker, value in sorted(having.items()):
            if value != right:
                odd.setdefault(worker, _said(one, value, right, layout.num_layers))
    return odd if dispensable(layout, odd) else None


def _said(one: Difference, value: int, right: int, num_layers: int) -> str:
    bits = 2**64
    if value == UNLIKE:
        return f"{one.kind} of {layer_name(one.layer, num_layers)} are not the same on its own ranks"
    return (
        f"{one.kind} of {layer_name(one.layer, num_layers)} hash to {value % bits:016x} on rank(s) "
        f"{list(one.alike[value])}, and to {right % bits:016x} on ranks {list(one.alike[right])}"
    )
