"""What a script's TrainingJob gets wrong, told before anything is trained."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

from odyssey_megatron.errors import ConfigError

if TYPE_CHECKING:
    from odyssey_megatron.mcore.plugin import TrainingJob

_PLAIN = (bool, int, float, str, bytes, np.generic)
_SIZES = "train_iters global_batch_size micro_batch_size seq_length vocab_size pipeline_model_parallel_size".split()


def check_job(job: TrainingJob, *, sequence_balance: str) -> None:
    """Raises ConfigError for what is wrong with ``job`` whatever its data are.

    ``sequence_balance``: the value of ``--odyssey-sequence-balance``.
    """
    _check_sizes({name: getattr(job, name) for name in _SIZES})
    _check_loss_names(job.loss_names)
    _check_schedule(job.scheduler)
    check_rates(job.model.optimizer_config, job.scheduler)
    if sequence_balance != "off" and job.squared_lengths is None:
        raise ConfigError(
            f"--odyssey-sequence-balance {sequence_balance} deals microbatches by the lengths of the sequences in "
            "them, and this script's TrainingJob does not say how long these are. Give it squared_lengths, or leave "
            "the flag out."
        )


def _check_sizes(sizes: Mapping[str, Any]) -> None:
    """Raises ConfigError unless all ``sizes`` are whole numbers of 1 or more."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or int(size) < 1:
            raise ConfigError(
                f"TrainingJob has {name} {size!r}, and a whole number of 1 or more is expected. Change it."
            )


def _check_loss_names(names: Any) -> None:
    """Raises ConfigError for one name in place of several, whose letters would be taken for names."""
    if isinstance(names, str):
        raise ConfigError(
            f"TrainingJob has loss_names {names!r}, and a sequence of names is expected. Give it ({names!r},)."
        )


def _check_schedule(scheduler: Mapping[str, Any]) -> None:
    """Raises ConfigError if Megatron's OptimizerParamScheduler does not take these arguments, or does not know a style
    among them, which it would say in the middle of training.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from odyssey_megatron.mcore.model.optimizer import LearningRate

    taken = dict(inspect.signature(OptimizerParamScheduler).parameters)
    del taken["optimizer"]
    unknown = sorted(scheduler.keys() - taken.keys())
    missing = [
        name
        for name, one in taken.items()
        if one.default is inspect.Parameter.empty and name not in scheduler
    ]
    if unknown or missing:
        raise ConfigError(
            f"TrainingJob's scheduler has unknown arguments ({', '.join(unknown) or 'none'}) or lacks some "
            f"({', '.join(missing) or 'none'}). Give it those of Megatron's OptimizerParamScheduler: "
            f"{', '.join(taken)}."
        )
    try:
        LearningRate(**scheduler)
        whole = OptimizerParamScheduler(cast(Any, SimpleNamespace(param_groups=[{}])), **scheduler)
        whole.step(increment=whole.lr_decay_steps)
    except ConfigError:
        raise
    except Exception as error:  # Megatron's for a style that it does not know is of no other class
        raise ConfigError(
            f"Megatron refuses TrainingJob's scheduler {dict(scheduler)}: {str(error) or repr(error)}. Give it styles "
            "that OptimizerParamScheduler knows, and what these need."
        ) from error


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
