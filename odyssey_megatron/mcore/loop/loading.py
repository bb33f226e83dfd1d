"""The checkpoint that a job begins from: whether it can, and all ranks' reading it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch.distributed as dist

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.rebuild.world import Together


def check_loadable(args: Any) -> None:
    """Raises ConfigError: the optimizer's state of --load is cut into shards of Megatron's distributed optimizer.

    Odyssey's own checkpoints have whole states, whatever the job's flags: ``arguments.adapt`` unsets this one first.
    """
    if not args.load or args.no_load_optim or args.finetune:
        return
    tracker = Path(args.load) / "latest_checkpointed_iteration.txt"
    step = args.ckpt_step or (tracker.read_text().strip() if tracker.is_file() else "")
    folder = Path(args.load) / f"iter_{int(step):07d}" if str(step).isdigit() else None
    if folder is None or not (folder / "metadata.json").is_file():
        return  # Megatron says what is missing
    from megatron.core import dist_checkpointing

    saved = dist_checkpointing.load_common_state_dict(str(folder)).get("args")
    if getattr(saved, "use_distributed_optimizer", False) and not getattr(saved, "no_save_optim", False):
        raise ConfigError(
            f"the checkpoint {folder} was saved with --use-distributed-optimizer, whose shards of optimizer state "
            "do not load with --odyssey yet. Let plain Megatron-LM load it and save it once more without the flag, or "
            "begin with its weights alone: --no-load-optim."
        )


def load(
    args: Any, chunks: list[Any], optimizer: Any, scheduler: Any, context: Any, together: Together
) -> None:
    """Megatron's own load into ``chunks``, the layers' optimizers and ``args``. Raises ConfigError."""
    from megatron.training import training

    check_loadable(args)

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
