"""The optimizer's state in the form in which Megatron's distributed optimizer saves it, so that jobs can switch to and
from it.

core_v0.16.1 to core_v0.19.0 write two types (``distrib_optim_sharding_type`` of a checkpoint's content;
megatron/training/checkpointing.py, ``_build_sharded_state_dict_metadata``). With --dist-ckpt-optim-fully-reshardable it
is ``fully_reshardable``: each tensor under its parameter's name and in its shape. Otherwise it is ``dp_reshardable``:
each bucket of a stage's flat buffer as one tensor, in which parameters lie as they did in that stage. Both are read,
the second by working out where each parameter lies; the first is written, since layers may be anywhere.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.loop import loading
from odyssey_megatron.mcore.model.experts import is_spread
from odyssey_megatron.mcore.model.layers import HeldLayer
from odyssey_megatron.mcore.model.optimizer import pairs, settings_of
from odyssey_megatron.mcore.model.span import MegatronSplit

TYPE = "distrib_optim_sharding_type"
BY_PARAMETER, BY_BUCKET = "fully_reshardable", "dp_reshardable"
_BUCKET = re.compile(
    r"((?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\..*\.bucket_idx_(\d+))\.param"
)
_ALIGNMENT = 64
"""Parameters begin at multiples of this in a bucket (core_v0.16.1 core/distributed/param_and_grad_buffer.py;
core_v0.19.0 core/optimizer/param_layout.py, ``pad_param_start``).
"""

Parameter = tuple[int, str]
"""A layer, and the name of a parameter in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlace:
    """Where a parameter lies in a bucket."""

    bucket: str
    """Prefix of the keys of the bucket's tensors."""
    start: int
    bucket_numel: int


class Saved:
    """What checkpoints say about themselves: those of this job, and the one that Megatron has opened last."""

    def __init__(self) -> None:
        self.distributed = False
        """Whether this job's checkpoints are to have the state of a distributed optimizer."""
        self.replicas = 1
        """Of the launch line."""
        self.args: Any = None
        self.folder = ""

    def say(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Megatron's ``_build_sharded_state_dict_metadata``, with the type that this job writes."""
        return original(*args, **kwargs) | ({TYPE: BY_PARAMETER} if self.distributed else {})

    def describe(self, original: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        """Megatron's ``generate_state_dict``; its arguments are the launch line's, where Odyssey has changed them."""
        state = original(args, *rest, **kwargs)
        told = copy.copy(args)
        told.use_distributed_optimizer, told.data_parallel_size = self.distributed, self.replicas
        return state | {"args": told}

    def note(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Megatron's ``_load_base_checkpoint``; remembers the checkpoint that was opened. Raises ConfigError."""
        folder, given = args[:2]
        with loading.refused(folder, lambda: Path(self.folder or loading.named(folder, given))):
            found = original(*args, **kwargs)
        if found[0] is not None:
            found[0].pop(
                "rerun_state_machine", None
            )  # Odyssey finds out by itself where a wrong number comes from
            self.args, self.folder = found[0].get("args"), str(found[1])
            if found[3].name == "LEGACY":
                raise ConfigError(
                    f"the checkpoint {self.folder} was saved with --ckpt-format torch: files of ranks, which fit the "
                    "layout that they were saved under alone. Let plain Megatron-LM convert it: the same launch line "
                    "without --odyssey, with --ckpt-convert-format torch_dist --ckpt-convert-save ANOTHER_FOLDER."
                )
            if getattr(self.args, "no_save_optim", False) and not (
                found[2] or given.finetune or given.no_load_optim
            ):
                raise ConfigError(
                    f"the checkpoint {self.folder} was saved with --no-save-optim, and has no optimizer's state. Begin "
                    "with its weights alone: --no-load-optim, or --finetune for iteration 0."
                )
        return found

    def type_of(self, metadata: Mapping[str, Any] | None) -> str:
        """The type of the opened checkpoint; empty if its optimizer was not a distributed one. Raises ConfigError."""
        found = (metadata or {}).get(TYPE, "")
        distributed = getattr(self.args, "use_distributed_optimizer", False)
        if found not in ("", BY_PARAMETER, BY_BUCKET) or (distributed and not found):
            kind = f"of the type {found}" if found else "without a type"
            raise self._refused(f"by an older Megatron-LM, with optimizer states {kind}", "an older version")
        return str(found)

    def check_experts(self, parallel: int) -> None:
        """Check the number of expert-parallel ranks. Raises ConfigError if the checkpoint has one and this job several
        (``parallel``), or the reverse: with several Megatron has two optimizers, else one.
        """
        saved = getattr(self.args, "expert_model_parallel_size", None) or 1
        if (saved > 1) != (parallel > 1):
            raise ConfigError(
                f"the checkpoint {self.folder} was saved with --expert-model-parallel-size {saved}, and this job has "
                f"{parallel}. With one and with several Megatron-LM saves the optimizer's state differently. Use "
                f"{'one above 1' if saved > 1 else '1'}, or begin with its weights alone: --no-load-optim."
            )

    def _refused(self, why: str, what: str) -> ConfigError:
        return ConfigError(
            f"the checkpoint {self.folder} was saved {why}, which Odyssey does not read. Let plain Megatron-LM load it "
            f"and save it again without {what}, with --dist-ckpt-optim-fully-reshardable; or begin with its weights "
            "alone: --no-load-optim."
        )

    def slices(self, held: Sequence[HeldLayer], config: Any, cell: Any) -> dict[Parameter, ParameterPlace]:
        """Where the parameters of all layers lie in the buckets of this rank's shard. Collective.

        Args:
            held: this rank's layers.
            config: the model's.
            cell: the groups of this rank's cell.

        Raises:
            ConfigError: the buckets were made for another parallelism, or their sizes do not add up.
        """
        for flag, group in (
            ("tensor-model", cell.tp),
            ("expert-model", cell.ep),
            ("expert-tensor", cell.expt_tp),
        ):
            saved_size = getattr(self.args, f"{flag.replace('-', '_')}_parallel_size", None) or 1
            if group.size() != saved_size and (flag != "expert-tensor" or cell.ep.size() > 1):
                raise self._cannot_be_cut(f"with --{flag}-parallel-size {saved_size}, not {group.size()}")
        found: list[Any] = [None] * dist.get_world_size()
        mine = {
            one.index: [(name, p.numel(), is_spread(p)) for name, p in one.named_parameters()] for one in held
        }
        dist.all_gather_object(found, mine)
        numels = {layer: parameters for one in found for layer, parameters in one.items()}
        tied = behind if (behind := config.num_layers + 2) in numels else None
        stored, result = _stored_buckets(self.folder), dict[Parameter, ParameterPlace]()
        for stage, chunks in enumerate(_split(config, self.args).chunks()):
            # Experts that are spread over ranks have an optimizer of their own.
            for spread, group in enumerate((cell.tp, cell.tp_ep)):
                parameters = [
                    [
                        ((layer, name), numel)
                        for layer in _of_chunk(*chunk, tied, embeds=bool(config.mtp_num_layers))
                        for name, numel, kind in numels[layer]
                        if kind == spread
                    ]
                    for chunk in chunks
                ]
                shard = stage * group.size() + group.rank()
                for buffer, chunk in enumerate(filter(None, parameters)):
                    result |= self._placed(stage, stored.get((spread, shard, buffer), []), chunk)
        return result

    def _placed(
        self, stage: int, buckets: Sequence[tuple[str, int]], chunk: Sequence[tuple[Parameter, int]]
    ) -> dict[Parameter, ParameterPlace]:
        """Where the parameters of a ``chunk`` lie. Raises ConfigError."""
        placed = dict(placed_in(buckets, chunk))
        if len(placed) < len(chunk):
            raise self._cannot_be_cut(
                f"with buffers of {[numel for _, numel in buckets]} numbers in stage {stage}, which are not "
                f"those of its {len(chunk)} parameters of {sum(numel for _, numel in chunk)} numbers here,"
            )
        return placed

    def _cannot_be_cut(self, how: str) -> ConfigError:
        return ConfigError(
            f"the checkpoint {self.folder} was saved {how} and has the optimizer's state as {BY_BUCKET}: in the flat "
            "buffers of its ranks, which fit no other cut of a layer (nor do they in Megatron-LM). Use the model, "
            "tensor and expert parallelism that it was saved with; or let plain Megatron-LM load it with these, and "
            "save it again with --dist-ckpt-optim-fully-reshardable; or begin with its weights alone: --no-load-optim."
        )


def _of_chunk(first: int, last: int, tied: int | None, *, embeds: bool) -> list[int]:
    """The layers of one of Megatron's chunks, in the order of their parameters. The weight that embedding and head
    share comes first in the embedding's chunk; if the head is in another chunk, it comes last there, or first if that
    chunk ``embeds`` tokens. ``tied``: the layer number of that weight.
    """
    layers = [*range(first, last)]
    if tied is None or (0 < first and last < tied):
        return layers
    return [tied, *layers] if embeds or not first else [*layers, tied]


def _stored_buckets(folder: str) -> dict[tuple[int, int, int], list[tuple[str, int]]]:
    """The buckets, as (prefix of their keys, numel), of each (place of the optimizer in a chain, number of the stage's
    shard, buffer in it).
    """
    found: dict[tuple[int, int, int], dict[int, tuple[str, int]]] = defaultdict(dict)
    for key, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if (match := _BUCKET.fullmatch(key)) and isinstance(entry, TensorStorageMetadata):
            chain, shard, buffer, bucket = (int(one or 0) for one in match.groups()[1:])
            found[chain, shard, buffer][bucket] = (match.group(1), entry.size.numel())
    return {place: [one for _, one in sorted(buckets.items())] for place, buckets in found.items()}


def _split(config: Any, saved: Any) -> MegatronSplit:
    """How the model was split in the job with the arguments ``saved``."""
    config = copy.copy(config)
    for name, argument in (
        ("pipeline_model_parallel_size", "pipeline_model_parallel_size"),
        ("num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers"),
        ("num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers"),
        ("account_for_embedding_in_pipeline_split", "account_for_embedding_in_pipeline_split"),
        ("account_for_loss_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    ):
        setattr(config, name, getattr(saved, argument, None))
    return MegatronSplit.of(
        config,
        stages=saved.pipeline_model_parallel_size,
        virtual_stages=getattr(saved, "virtual_pipeline_model_parallel_size", None),
        layout=getattr(saved, "pipeline_model_parallel_layout", None),
    )


def placed_in(
    buckets: Sequence[tuple[str, int]], parameters: Sequence[tuple[Parameter, int]]
) -> Iterator[tuple[Parameter, ParameterPlace]]:
    """Where each of a chunk's ``parameters``, given with its numel, lies. Yields fewer of them, or none, if they do not
    fit.

    Megatron fills a buffer from the last parameter to the first, and closes buckets for reasons of its own. The end of
    a bucket can be told from its numel, which includes the padding between parameters. It may or may not include the
    padding behind the last one (it does before a weight that two stages share).
    """
    rest, at = list(buckets), 0
    for parameter, numel in reversed(parameters):
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        if rest and at >= rest[0][1]:
            rest, at = rest[1:], 0
        if not rest or at + numel > rest[0][1]:
            return
        # The last parameter must end where the last bucket does.
        if parameter != parameters[0][0] or (len(rest) == 1 and at + numel == rest[0][1]):
            yield parameter, ParameterPlace(bucket=rest[0][0], start=at, bucket_numel=rest[0][1])
        at += numel


# -- the state ---------------------------------------------------------------------------------------------------------


def _states(whole: Any) -> dict[int, dict[str, torch.Tensor]]:
    """For each parameter of the optimizer ``whole``, by position: the parameter that is optimized, and its optimizer
    state.
    """
    return {
        place: {"param": main.data}
        | {name: one for name, one in whole.optimizer.state[main].items() if name != "step"}
        for place, (_, main) in enumerate(pairs(whole))
    }


def _by_parameter(whole: Any, model_state: Any, *, rounded: bool) -> dict[int, dict[str, Any]]:
    """:func:`_states` for a checkpoint, each tensor under its parameter's name. Unless ``rounded``, all are in the type
    of the parameter that is optimized: so Megatron saves moments that are kept in shorter types (core_v0.16.1
    core/optimizer/distrib_optimizer.py, ``_get_main_param_and_optimizer_states``).
    """
    named = get_param_id_to_sharded_param_map(model_state, cast(Any, [shown for shown, _ in pairs(whole)]))
    return {
        place: {
            name: make_sharded_optimizer_tensor(
                named[place], one if rounded else one.to(tensors["param"].dtype), f"optimizer.state.{name}"
            )
            for name, one in tensors.items()
        }
        for place, tensors in _states(whole).items()
    }


def to_write(whole: Any, model_state: Any, step: float | None) -> dict[str, Any]:
    """The state of ``whole``, an optimizer that is not distributed, in the form in which a distributed one writes it.

    ``step``: the number of steps it has made; None: its parameter groups know.
    """
    counted = {} if step is None else {"step": step}
    scale = {"grad_scaler": whole.grad_scaler.state_dict()} if whole.grad_scaler else {}
    return scale | {
        "optimizer": {"param_groups": [settings_of(group) | counted for group in whole.param_groups]},
        "param_state": _by_parameter(whole, model_state, rounded=False),
        "param_state_sharding_type": BY_PARAMETER,
    }


def to_read(
    whole: Any, model_state: Any, slices: Mapping[int, ParameterPlace] | None, chained: str = ""
) -> dict[str, Any]:
    """What must be loaded from a checkpoint for :func:`take`.

    Args:
        chained: prefix of the keys of buckets for ``whole``, if it is one of several optimizers.
        slices: where each parameter of the model, by its id, lies in a bucket; None: parameters are found by name.
    """
    if slices is None:
        return {"states": _by_parameter(whole, model_state, rounded=True)}
    lying = [slices[id(shown)] for shown, _ in pairs(whole)]
    rank = dist.get_rank()
    states = {
        place: {name: _in_bucket(lying[place], name, one, rank) for name, one in tensors.items()}
        for place, tensors in _states(whole).items()
    }
    # All stages have saved the same parameter groups and loss scale.
    alike = {
        name: ShardedObject(
            f"{chained}optimizer.distributed.dp_group_idx_0.{name}", None, (1,), (0,), (0, 0, rank)
        )
        for name in ("optimizer", *(["grad_scaler"] if whole.grad_scaler else []))
    }
    return {"states": states} | alike


def _in_bucket(lies: ParameterPlace, name: str, tensor: torch.Tensor, rank: int) -> ShardedTensor:
    flat = tensor.detach().reshape(-1)
    return ShardedTensor(
        f"{lies.bucket}.{name}",
        flat,
        flat.dtype,
        local_shape=tuple(flat.shape),
        global_shape=(lies.bucket_numel,),
        global_offset=(lies.start,),
        axis_fragmentations=None,
        replica_id=(0, 0, rank),
    )


def take(whole: Any, loaded: Mapping[str, Any]) -> None:
    """Give ``whole`` what was loaded, bit for bit. Megatron leaves out what is empty: the states, if there are no
    parameters.
    """
    for place, tensors in _states(whole).items():
        for name, one in tensors.items():
            one.copy_(loaded["states"][place][name].reshape(one.shape))
    if whole.grad_scaler and "grad_scaler" in loaded:
        whole.grad_scaler.load_state_dict(loaded["grad_scaler"])
    saved = [{**group, "params": []} for group in loaded["optimizer"]["param_groups"]]
    found = MegatronOptimizer._filter_and_reorder_param_groups(whole.param_groups, saved)
    for group, said in zip(whole.param_groups, found, strict=True):
        step = said.get("step")
        group.update(
            {name: one for name, one in settings_of(said).items() if name != "step" or name in group}
        )
        for main in group["params"]:
            if "step" in whole.optimizer.state[main]:
                whole.optimizer.state[main]["step"].fill_(step)
