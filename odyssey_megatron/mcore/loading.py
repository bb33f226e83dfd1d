"""Whether a checkpoint is one that the job can begin from, before all ranks read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from odyssey_megatron.errors import ConfigError


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
