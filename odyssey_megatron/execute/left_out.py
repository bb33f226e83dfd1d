"""A worker whose numbers are wrong leaves the job, as if it had died, and the others go on without it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import LeftOut, PeerFailed
from odyssey_megatron.metrics.journal import host_name
from odyssey_megatron.metrics.outlet import say
from odyssey_megatron.names import step_name
from odyssey_megatron.plan.layout import Layout

_HOST_BYTES = 64


def leave_out(
    wrong: Mapping[int, str],
    group: dist.ProcessGroup,
    cell: Cell,
    step: int,
    note: Callable[..., None],
) -> NoReturn:
    """Make ranks whose numbers are wrong leave the job. Collective over ``group``, of all members; never returns.

    Args:
        wrong: Worker -> what is wrong with its numbers. It is the same on all members.
        cell: The cell of this rank.
        step: The step in which the numbers turned out to be wrong.
        note: Writes down the event ``left_out`` of each rank that leaves; called on one rank that stays.

    Raises:
        LeftOut: On the ranks of these workers.
        PeerFailed: On all others, for whom a generation without these workers will follow.
    """
    hosts = _hosts(group, cell.rank)
    why = {rank: text for worker, text in wrong.items() for rank in cell.numbers(worker) if rank in hosts}
    if cell.rank == min(set(hosts) - set(why)):
        for rank, text in sorted(why.items()):
            host = hosts.get(rank, "unknown")
            where = f"RANK {rank} (HOST {host}) IS LEFT OUT, {step_name(step)}"
            say(f"[odyssey] {where}: {text}. The others go on without it.")
            note("left_out", step, target=rank, host=host, why=text)
    try:
        # Nobody leaves before all are here; otherwise some would not know why.
        dist.barrier(group=group)
    finally:
        if cell.rank in why:
            raise LeftOut(f"its numbers are wrong: {why[cell.rank]}. Have a look at its hardware")
    raise PeerFailed(f"rank(s) {sorted(why)} are left out")


def dispensable(layout: Layout, workers: Collection[int]) -> bool:
    """Return whether other workers have the state of each layer that ``workers`` have."""
    return not any(set(one) <= set(workers) for owners in layout.owners for one in owners)


def _hosts(group: dist.ProcessGroup, rank: int) -> dict[int, str]:
    """Return rank -> name of its host. Collective."""
    name = host_name().encode()[:_HOST_BYTES].ljust(_HOST_BYTES)
    mine = torch.tensor([rank, *name], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    rows = [one.tolist() for one in everyone]
    return {row[0]: bytes(row[1:]).decode(errors="replace").strip() for row in rows}
