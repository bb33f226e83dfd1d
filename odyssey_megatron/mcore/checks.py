"""What a script's TrainingJob gets wrong, told before anything is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from odyssey_megatron.errors import ConfigError

_PLAIN = (bool, int, float, str, bytes, np.generic)


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


def digest_of_samples(dataset: Sequence[Any], *, train_iters: int, global_batch_size: int) -> str:
    """Return a digest of the first and the last sample that training takes, which is to be the same on all ranks.

    A pipeline's first and last stage read a sample each by themselves, and after a loss another rank does once more.
    Where readings differ no recovery can be exact, and even without one the loss is not that of the tokens.

    Raises:
        ConfigError: a sample that is read a second time is another one.
    """
    ends = (0, train_iters * global_batch_size - 1)
    first = [_digest(dataset[at]) for at in ends]
    for at, once in zip(ends, first, strict=True):
        if _digest(dataset[at]) != once:
            raise ConfigError(
                f"the data set's sample {at} is another one when it is read a second time. Several ranks read a sample "
                "each by themselves, and once more after a loss. Make what __getitem__ draws depend on the index "
                "alone: seed a generator of its own with (seed, index)."
            )
    return hashlib.sha256("".join(first).encode()).hexdigest()[:16]


def _digest(sample: Any) -> str:
    found = hashlib.sha256()
    leaves, structure = pytree.tree_flatten(sample)
    found.update(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor | np.ndarray):
            flat = torch.as_tensor(leaf).detach().cpu().contiguous().flatten()
            found.update(f"{flat.dtype} {list(leaf.shape)}".encode())
            found.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, _PLAIN):
            found.update(repr(leaf).encode())
    return found.hexdigest()


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
