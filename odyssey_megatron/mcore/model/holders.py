"""Whether all holders of a layer have the same bytes: what every way of recovery rests on.

Does what Megatron's ``check_param_hashes_across_dp_replicas`` (``megatron/core/utils.py``) does for its data-parallel
groups, for any holders, and for the optimizer state that they keep, too.
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
from odyssey_megatron.plan.slices import Span, kept

Digests = Mapping[tuple[int, Span | None], bytes]
"""(layer, span of its optimizer state; None: its weights) -> digest of it."""
Row = tuple[int, int, Mapping[tuple[int, Span | None], int]]
"""Of a rank its number, the number of a part, and the first bits of the digests of what it has in that."""
NOTHING, UNLIKE = -1, -2
"""What the first bits of a digest are taken not to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A part of the model that not all its holders have alike."""

    layer: int
    span: Span | None
    """Of its optimizer state; None: these are the weights."""
    alike: Mapping[int, tuple[int, ...]]
    """What the first 64 bits of the digest are -> the ranks where they are that."""

    @property
    def kind(self) -> str:
        """In words."""
        return "weights" if self.span is None else "optimizer state"

    def said(self, num_layers: int) -> str:
        """In words; those first of whom there are most."""
        groups = sorted(self.alike.values(), key=len, reverse=True)
        where = " and on ".join(str(list(ranks)) for ranks in groups)
        return f"{self.kind} of {layer_name(self.layer, num_layers)} on ranks {where}"


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """SHA-256 of the bytes of ``tensors``."""
    result = hashlib.sha256()
    for tensor in tensors:  # a copy, since whoever shares memory with NumPy can never give it back (Parking)
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        result.update(copy.reshape(-1).view(torch.uint8).numpy().data)
    return result.digest()


def digests(layers: Iterable[HeldLayer], parts: Parts) -> list[dict[tuple[int, Span | None], bytes]]:
    """For each of ``parts``: of the weights of each layer, and of what is kept of its optimizer state."""
    found: list[dict[tuple[int, Span | None], bytes]] = [{} for _ in parts]
    for layer in layers:
        for part, result in zip(parts, found, strict=True):
            result[layer.index, None] = digest(parts.of(layer, layer.weights(), part).values())
        if layer.optimizer is not None:
            with layer.optimizer.at_hand():
                for span in layer.optimizer.spans:
                    for part, result in zip(parts, found, strict=True):
                        numbers = layer.optimizer.numbers(parts.number(part), span)
                        result[layer.index, span] = digest(numbers.values())
    return found


def odd_ones(
    mine: Mapping[int, Digests], group: dist.ProcessGroup, *, rank: int, cell_size: int, layout: Layout
) -> dict[int, str]:
    """Worker -> what it has otherwise than the others; empty if all holders of each layer have the same.

    Collective over ``group``, all ranks of the job.

    Args:
        mine: by the number of a part of its layers: holders have the same one if their tensor-parallel rank is the
            same, and one of a smaller cell has several.
        rank: this one, in the job.
        cell_size: ranks of a whole worker.

    Raises:
        HoldersDiffer: on every rank alike, if it is not clear who is right.
    """
    num_layers = layout.num_layers
    most = torch.tensor(len(mine))
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    # Of each layer its weights, and as many slices as anybody keeps: which those are is known of each worker.
    width = 1 + max(layout.copies, 1)
    table = torch.full((int(most), 2 + len(layout.all_holders) * width), NOTHING, dtype=torch.int64)
    own = _kinds(layout, rank // cell_size)
    for row, (part, digests_of_it) in zip(table, mine.items(), strict=False):
        row[:2] = torch.tensor([rank, part])
        for (layer, span), value in digests_of_it.items():
            row[2 + layer * width + own[layer].index(span)] = int.from_bytes(value[:8], "big", signed=True)
    tables = [torch.empty_like(table) for _ in range(group.size())]
    dist.all_gather(tables, table, group=group)
    rows = []
    for number, part, *values in (row for one in tables for row in one.tolist()):
        of_worker = enumerate(_kinds(layout, number // cell_size) if number >= 0 else ())
        places = {
            (layer, span): values[layer * width + at]
            for layer, kinds in of_worker
            for at, span in enumerate(kinds)
        }
        rows.append((number, part, places))
    found = differences(rows)
    odd = decided(found, layout, cell_size)
    if odd is None:
        said = [one.said(num_layers) for one in found]
        raise HoldersDiffer(
            f"{len(said)} part(s) of the model differ between their holders: {'; '.join(said[:4])}"
            f"{'; ...' if said[4:] else ''}. Hardware that computes wrongly, or a bug: please report it with the "
            "journal. Restart from a checkpoint before it, without the ranks that are alone with what they have."
        )
    return odd


def _kinds(layout: Layout, worker: int) -> list[list[Span | None]]:
    """Of each layer what ``worker`` may have."""
    return [[None, *kept(found).get(worker, ())] for found in layout.states]


def differences(rows: Iterable[Row]) -> list[Difference]:
    """The parts that some have otherwise; weights of a layer first, then its slices in order."""
    holders: dict[tuple[int, Span, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, shard, digests in rows:
        for (layer, span), value in digests.items():
            if value != NOTHING:
                holders[layer, span or _WEIGHTS, shard][value].append(rank)
    return [
        Difference(
            layer=layer,
            span=None if span == _WEIGHTS else span,
            alike={value: tuple(sorted(ranks)) for value, ranks in alike.items()},
        )
        for (layer, span, _), alike in sorted(holders.items())
        if len(alike) > 1
    ]


_WEIGHTS: Span = (-1, -1)
"""In the place of a span, so that they come first."""


def decided(found: Sequence[Difference], layout: Layout, cell_size: int) -> dict[int, str] | None:
    """Worker -> what it has otherwise than those who are right; None if that is not clear of every difference, or
    nobody who is right would be left of some layer.

    Right is what more than half of those have who make a step by themselves, if they are two at least. Weights that
    others have stepped, with the distributed optimizer, are no second opinion on that: where owners of a layer's slices
    differ, and it is clear who of them is wrong, the others are sent right ones again. Where they do not, weights were
    changed behind a step, and most have right ones. A worker whose own ranks differ has nothing that is right.
    """
    stepped_wrongly = {one.layer for one in found if one.span is not None} if layout.keepers else set()
    odd: dict[int, str] = {}
    for one in found:
        having: dict[int, int] = {}
        for value, ranks in one.alike.items():
            for worker in {rank // cell_size for rank in ranks}:
                having[worker] = UNLIKE if worker in having else value
        if one.span is None and one.layer in stepped_wrongly:
            unlike = [worker for worker, value in having.items() if value == UNLIKE]
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
