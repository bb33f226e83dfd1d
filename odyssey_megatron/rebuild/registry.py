"""Make a group known to ``torch.distributed`` that it has not made itself, by entering it in torch's tables."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def register(
    group: dist.ProcessGroup,
    name: str,
    *,
    backend: str,
    device: str,
    store: dist.Store,
    ranks: dict[int, int],
) -> None:
    """Register ``group``, so that ``dist.all_reduce(tensor, group=group)`` finds it.

    Args:
        ranks: Global rank -> rank in ``group``.
    """
    torch_name: Any = name  # from torch 2.13 on the type is a NewType
    config = f"{device}:{backend}"
    if hasattr(c10d, "_register_pg_in_world"):
        c10d._register_pg_in_world(
            group,
            backend_name=backend,
            store=store,
            group_name=torch_name,
            backend_config=config,
            rank_mapping=ranks,
        )
        return
    # Up to version 2.12 torch has no function for this. Source: _new_process_group_helper of torch 2.11.
    world: Any = c10d._world
    world.pg_map[group] = backend, store
    world.pg_names[group] = name
    world.pg_backend_config[group] = config
    world.pg_group_ranks[group] = ranks
    c10d._register_process_group(torch_name, group)
    tag = f"ptd:{name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
