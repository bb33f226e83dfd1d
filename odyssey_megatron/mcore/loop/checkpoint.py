"""Megatron's checkpoints for a job whose layers may lie anywhere.

Megatron writes and reads them itself (``torch_dist``): each tensor knows its global name and place, so a checkpoint
written under a ragged layout loads into any other. Odyssey says which layers a chunk has and which holder of a layer
writes it, and presents the optimizers of the layers as the one optimizer that Megatron expects.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.errors import MegatronIncompatible
from odyssey_megatron.execute.rank import RankRuntime
from odyssey_megatron.mcore.loop import shards
from odyssey_megatron.mcore.loop.whole import WholeLayers
from odyssey_megatron.mcore.model import span
from odyssey_megatron.mcore.model.experts import is_spread
from odyssey_megatron.mcore.model.flat import Cut
from odyssey_megatron.mcore.model.holdings import Holdings
from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock
from odyssey_megatron.mcore.model.model import MegatronModel
from odyssey_megatron.mcore.model.optimizer import LayerOptimizer, count_steps, pairs, settings_of, take_over
from odyssey_megatron.upstream import compat


def prepare(holdings: Holdings, block: LayerBlock) -> None:
    """Make the chunk of ``block`` describe its layers correctly to Megatron's checkpointing."""
    chunk: Any = block.model.module  # a GPTModel or its like
    original = type(chunk).sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        offset = max(block.first - 1, 0)
        with span.building(offset, len(chunk.decoder.layers)), block.shown() as elsewhere:
            state = original(chunk, *args, **kwargs)
        places = {id(one): place for layer in block.layers for one, place in _places(holdings, layer)}
        others = holdings.place.among(block.first)
        known = state.items() if block.borrowed is not None else ()
        shared = [name for name, shard in known if shard.data is block.borrowed]
        for name in shared:  # either copy of the shared weight will do
            state[name].replica_id = (0, *state[name].replica_id[1:])
            places[id(block.borrowed)] = holdings.place.among(block.spec.tied)
            if elsewhere:  # another chunk of this worker has it
                del state[name]
        experts = holdings.place.among(block.first, spread=True)
        for shard in _shards(state):  # only the first holder writes
            place = experts if ".mlp.experts." in shard.key else others  # for what is not a parameter
            shard.replica_id = (*shard.replica_id[:-1], places.get(id(shard.data), place))
        if holdings.cell.tensor_each > 1:
            dict_list_map_inplace(lambda shard: _in_parts(shard, holdings.cell.tensor_each), state)
        return state

    chunk.sharded_state_dict = sharded_state_dict


def _places(holdings: Holdings, layer: HeldLayer) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Yield each parameter of ``layer`` with this rank's place among its holders, the first of which writes it.

    Holders take turns, as ``--ckpt-fully-parallel-save`` (the default) says. Of experts that are spread over ranks
    different holders may have different numbers of parameters, so these turns go by the layer.
    """
    turns = itertools.count(layer.index)
    for one in layer.parameters():
        spread = is_spread(one)
        yield (
            one,
            holdings.place.among(layer.index, spread=spread, turn=layer.index if spread else next(turns)),
        )


def _in_parts(shard: Any, each: int) -> Any:
    """``shard`` of a rank that has ``each`` parts, cut into the shards of whole cells' ranks, which have one part each.
    Megatron requires all shards of a tensor to have one shape, and a tensor may span many layers, on cells of either
    kind.
    """
    cut = (
        Cut.of(cast(torch.Tensor, shard.data), each)
        if isinstance(shard, ShardedTensor | ShardedTensorFactory)
        else Cut()
    )
    if cut.dim is None:
        return shard
    dim = cut.dim

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        if isinstance(shard, ShardedTensorFactory):
            built: Any = shard.build_fn(key, data, replica_id, flattened_range)
        else:
            built = [replace(shard, key=key, data=data, dtype=data.dtype, replica_id=replica_id)]
        return [piece for one in built for piece in pieces(one)]

    def pieces(one: ShardedTensor) -> Iterator[ShardedTensor]:
        axis, length = one.prepend_axis_num + dim, one.local_shape[dim] // each
        held = cast(torch.Tensor, one.data)
        for number, data in enumerate(torch.split(held.detach(), length, dim)):
            offset, cuts = [*one.global_offset], [*(one.axis_fragmentations or ())]
            offset[axis] += number * length
            cuts[axis] *= each
            yield replace(
                one,
                data=data,
                local_shape=tuple(data.shape),
                global_offset=tuple(offset),
                axis_fragmentations=tuple(cuts),
            )

    def merge(loaded: Any) -> Any:
        whole = [torch.cat(loaded[at : at + each], dim) for at in range(0, len(loaded), each)]
        return cast(Any, shard.merge_fn)(whole) if isinstance(shard, ShardedTensorFactory) else whole[0]

    return ShardedTensorFactory(shard.key, shard.data, build, merge, shard.replica_id)


@contextlib.contextmanager
def _frozen(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """In the body Megatron treats ``parameters`` as not trainable."""
    for one in parameters:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in parameters:
            one.requires_grad_(True)


def _shards(value: Any) -> Iterator[Any]:
    if isinstance(value, ShardedBase):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _shards(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _shards(one)


class OptimizerView:
    """The optimizers of the held layers, presented to Megatron-LM's loop and checkpoints as a single optimizer."""

    is_stub_optimizer = False

    def __init__(
        self,
        model: MegatronModel,
        cell: ProcessGroupCollection,
        saved: shards.Saved,
        runtime: Callable[[], RankRuntime] | None = None,
    ):
        """``saved``: the checkpoint to load; ``runtime``: the job's, once it has one."""
        self._saved = saved
        self._committed: Callable[[], int] = (
            (lambda: runtime().committed) if runtime is not None else lambda: 0
        )
        self._whole = WholeLayers(
            model.holdings, lambda *block: runtime().holders_of(*block) if runtime else _nobody()
        )
        self._model, self._cell = model, cell
        self._takes_shards = False
        """Whether what is loaded has the types of a distributed optimizer."""
        self.loaded: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """For each parameter group here, its settings and those that a checkpoint gave it."""
        self.settings: dict[str, Any] = {}
        """Settings of the default group, as loaded."""
        # Megatron logs the learning rate from this group. The layers' own groups are set from the step's number.
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": 0.0, "default_config": True}]

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self._model.loss_scale.scaled(loss)

    def get_loss_scale(self) -> torch.Tensor:
        return self._model.loss_scale.value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a step zeroes its gradients itself."""

    def reload_model_params(self, state_dict: Any = None) -> None:
        for optimizer in self._own():
            optimizer.reload()

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The state for Megatron to save or load. Raises ConfigError.

        Collective, as are the other uses of :meth:`_assembled`. What all ranks have in common is written by the lowest
        rank, even if that keeps no state itself.
        """
        kind = self._saved.type_of(metadata) if is_loading else (metadata or {}).get(shards.TYPE)
        if is_loading:
            self._takes_shards = bool(kind)
            self._saved.check_experts(self._cell.ep.size())
        whole = self._assembled(self._whole.new() if is_loading else self._whole.gathered())
        parts = whole.chained_optimizers
        if is_loading and kind:
            slices = self._slices() if kind == shards.BY_BUCKET else None
            names = [f"chained_{place}." if len(parts) > 1 else "" for place in range(len(parts))]
            return _numbered(
                [
                    shards.to_read(one, model_sharded_state_dict, slices, name)
                    for one, name in zip(parts, names, strict=True)
                ]
            )
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [_step_of(one.optimizer) for one in parts])
        steps = [
            max((one for one in own if one is not None), default=None) for own in zip(*gathered, strict=True)
        ]
        if kind:
            return _numbered(
                [
                    shards.to_write(one, model_sharded_state_dict, step)
                    for one, step in zip(parts, steps, strict=True)
                ]
            )
        state = whole.sharded_state_dict(model_sharded_state_dict, is_loading, metadata=metadata, **kwargs)
        for one, step in zip(_each(state, len(parts)), steps, strict=True):
            if step is not None:
                one.get("optimizer", one)["state"]["common_step"] = torch.tensor(step)
        return state

    def _slices(self) -> dict[int, shards.ParameterPlace]:
        layers = self._model.holdings.layers
        slices = self._saved.slices(layers, self._model.spec.config, self._cell)
        return {
            id(one): slices[layer.index, name] for layer in layers for name, one in layer.named_parameters()
        }

    def load_state_dict(self, state_dict: Any) -> None:
        brought_together = self._whole.new()
        whole = self._assembled(brought_together)
        given = [settings_of(group) for group in whole.param_groups]
        parts = whole.chained_optimizers
        for one, saved in zip(parts, _each(state_dict, len(parts)), strict=True):
            if self._takes_shards:
                shards.take(one, saved)
                continue
            if not [*pairs(one)]:  # no state is gathered here, and Megatron leaves out what is empty
                saved.get("optimizer", saved).setdefault("state", {})
                saved.setdefault("fp32_from_fp16_params", [])
            before = {id(parameter): state for parameter, state in one.optimizer.state.items()}
            one.load_state_dict(saved)
            for parameter, loaded in one.optimizer.state.items():
                for name, value in before[id(parameter)].items():
                    value.copy_(torch.as_tensor(loaded[name]))
        self._whole.give_back(brought_together)
        self.loaded = list(zip(given, map(settings_of, whole.param_groups), strict=True))

    def take_over(self, loaded: list[tuple[Any, Any]]) -> None:
        """Apply the loaded settings of parameter groups to all of the model's, now and later."""
        self._model.spec.loaded_groups.extend(loaded)
        for optimizer in self._own():
            take_over(optimizer.param_groups, loaded)
        for _, instead in loaded:
            if instead.get("default_config"):
                self.settings = settings_of(instead)
                self.param_groups[0] |= {name: instead[name] for name in ("max_lr", "min_lr")}
                break

    def _own(self) -> list[LayerOptimizer]:
        return [layer.optimizer for layer in self._model.holdings.layers if layer.optimizer is not None]

    def _assembled(self, brought_together: Mapping[int, LayerOptimizer]) -> Any:
        """Megatron's optimizer for those layers of this rank whose state is whole, or is ``brought_together``; it
        shares the state of the layers' optimizers. It is a chain of one optimizer, and another for experts that are
        spread over ranks; with Muon more.
        """
        spec = self._model.spec
        whole_here = [
            layer.optimizer
            for layer in self._model.holdings.layers
            if layer.optimizer is not None and layer.optimizer.is_all and layer.index not in brought_together
        ]
        kept = [*whole_here, *brought_together.values()]
        chunks = [block.model for block in self._model.holdings.chunks] or [
            self._model.holdings.idle_block().model
        ]
        own = {id(shown): (main, state) for optimizer in kept for shown, main, state in optimizer.entries()}
        left_out = [one for chunk in chunks for one in chunk.parameters() if id(one) not in own]
        with _frozen(left_out):  # Megatron makes all ranks agree on the parameter groups and their order
            whole: Any = compat.optimizer_of(
                spec.optimizer_config, chunks, spec.config_overrides, self._cell, of_layer=False
            )
        parts, expected = whole.chained_optimizers, 1 + (spec.config.expert_model_parallel_size > 1)
        if len(parts) != expected and not compat.is_muon(spec.optimizer_config.optimizer):
            raise MegatronIncompatible(
                f"Megatron made {len(parts)} optimizers where Odyssey knows of {expected}."
            )
        for one in parts:
            one.init_state_fn = lambda *unused: None  # the state exists; Megatron cannot create SGD's
            one.grad_scaler = self._model.loss_scale.scaler
            if one.optimizer is not None:
                count_steps(one.optimizer)
        take_over(whole.param_groups, spec.loaded_groups)
        if (learning_rate := self._model.end.learning_rate) is not None:
            learning_rate.set(
                [whole], self._committed(), self._model.microbatches.batches, self._model.loss_scale
            )
        for one in parts:
            for shown, main in pairs(one):
                main.data, one.optimizer.state[main] = own[id(shown)][0].data, own[id(shown)][1]
        return whole


def _nobody() -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    raise AssertionError("without a job there are no other holders")


def _step_of(inner: torch.optim.Optimizer) -> float | None:
    """The number of steps that the optimizer has counted for its parameters; None if it does not count, or has none
    here.
    """
    return next((float(one["step"]) for one in inner.state.values() if "step" in one), None)


def _numbered(states: list[Any]) -> Any:
    """What Megatron saves of a chain of optimizers: the state of a single one, or each one's state by its position."""
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _each(state: Any, count: int) -> list[Any]:
    """The inverse of :func:`_numbered`."""
    return [state] if count == 1 else [state[place] for place in range(count)]
