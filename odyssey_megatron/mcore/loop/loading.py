"""All ranks' reading of the checkpoint that a job begins from."""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist

from odyssey_megatron.rebuild.world import Together


def load(
    args: Any, chunks: list[Any], optimizer: Any, scheduler: Any, context: Any, together: Together
) -> None:
    """Megatron's own load into ``chunks``, the layers' optimizers and ``args``. Raises ConfigError."""
    from megatron.training import training

    def work(world: Any) -> list[Any]:
        scheduler.num_steps = 0  # an earlier attempt may have counted
        args.iteration, args.num_floating_point_operations_so_far = training.load_checkpoint(
            chunks, optimizer, scheduler, checkpointing_context=context or {}
        )
        found: list[Any] = [None] * dist.get_world_size(world)
        dist.all_gather_object(found, optimizer.loaded, group=world)
        loaded = list(itertools.chain.from_iterable(found))
        return [one for place, one in enumerate(loaded) if one not in loaded[:place]]

    optimizer.take_over(together(work))
