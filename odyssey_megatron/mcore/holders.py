"""Whether all holders of a layer have the same bytes: what every way of recovery rests on.

Does what Megatron's ``check_param_hashes_across_dp_replicas`` (``megatron/core/utils.py``) does for its data-parallel
groups, for any holders, and for the optimizer state that they keep, too.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from odyssey_megatron.errors import HoldersDiffer
from odyssey_megatron.names import layer_name

KINDS = ("weights", "optimizer state")
Digests = Mapping[tuple[int, int], bytes]
"""(layer, index in :data:`KINDS`) -> digest of it."""
NOTHING = -1


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """SHA-256 of the bytes of ``tensors``."""
    result = hashlib.sha256()
    for tensor in tensors:  # a copy, since whoever shares memory with NumPy can never give it back (Parking)
        copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        result.update(copy.reshape(-1).view(torch.uint8).numpy().data)
    return result.digest()


def compare(mine: Digests, group: dist.ProcessGroup, *, rank: int, shard: int, num_layers: int) -> None:
    """Collective over ``group``, all ranks of the job.

    Args:
        rank: this one, in the job.
        shard: of its layers: holders have the same one if their tensor-parallel rank is the same.

    Raises:
        HoldersDiffer: on every rank alike.
    """
    row = torch.full((2 + num_layers * len(KINDS),), NOTHING, dtype=torch.int64)
    row[:2] = torch.tensor([rank, shard])
    for (layer, kind), value in mine.items():
        row[2 + layer * len(KINDS) + kind] = int.from_bytes(value[:8], "big") >> 1
    row = row.to(torch.cuda.current_device())
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    if found := differences([one.tolist() for one in rows], num_layers):
        raise HoldersDiffer(
            f"{len(found)} part(s) of the model differ between their holders: {'; '.join(found[:4])}"
            f"{'; ...' if found[4:] else ''}. Hardware that computes wrongly, or a bug: please report it with the "
            "journal. Restart from a checkpoint before it, without the ranks that are alone with what they have."
        )


def differences(rows: Sequence[Sequence[int]], num_layers: int) -> list[str]:
    """A text for each part that some have otherwise: see :func:`compare` for what a row is."""
    holders: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, shard, *digests in rows:
        for place, value in enumerate(digests):
            if value != NOTHING:
                holders[place, shard][value].append(rank)
    return [
        f"{KINDS[place % len(KINDS)]} of {layer_name(place // len(KINDS), num_layers)} on ranks "
        + " and on ".join(str(sorted(ranks)) for ranks in sorted(alike.values(), key=len, reverse=True))
        for (place, _), alike in sorted(holders.items())
        if len(alike) > 1
    ]
