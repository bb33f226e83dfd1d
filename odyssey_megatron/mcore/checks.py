"""What a script's TrainingJob gets wrong, told before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from odyssey_megatron.errors import ConfigError


def check_samples(dataset: Sequence[Any], *, train_iters: int, global_batch_size: int) -> None:
    """Raises ConfigError if training would come to the end of ``dataset``, perhaps days from now.

    A data set that begins anew behind its end may have a shorter ``len``; one without ``len`` is not asked.
    """
    needed = train_iters * global_batch_size
    if not hasattr(dataset, "__len__") or len(dataset) >= needed:
        return
    try:
        dataset[needed - 1]
    except LookupError:
        raise ConfigError(
            f"the data set has {len(dataset)} samples, and training takes {needed}: train_iters {train_iters} times "
            f"global_batch_size {global_batch_size}. Each is read once, in order. Train fewer steps, or let its "
            "__getitem__ begin anew behind the end."
        ) from None


def check_rates(optimizer_config: Any, scheduler: Mapping[str, Any]) -> None:
    """Raises ConfigError if the schedule has other learning rates than the optimizer.

    Megatron takes those of the optimizer where there are parameters, and the schedule's for its log.
    """
    for of_optimizer, of_schedule in (("lr", "max_lr"), ("min_lr", "min_lr")):
        ours = getattr(optimizer_config, of_optimizer)
        if of_schedule in scheduler and ours != scheduler[of_schedule]:
            raise ConfigError(
                f"OptimizerConfig has {of_optimizer} {ours}, and the scheduler {of_schedule} {scheduler[of_schedule]}. "
                "Megatron trains by the former, and would log the latter. Give both the same."
            )
