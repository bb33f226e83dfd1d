"""Megatron's optimizer, one for each layer, driven by a norm and a count that Odyssey's agreement provides.

Clipping is done here and not by ``optimizer/clip_grads.py``: the norm must count each layer once whatever the number of
its holders (I4), and Megatron's code takes float32 gradients only.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.model.parking import Parking
from odyssey_megatron.rebuild.world import alone

if TYPE_CHECKING:
    from odyssey_megatron.mcore.loop.batches import Batches
    from odyssey_megatron.mcore.model.layers import ModelSpec
    from odyssey_megatron.mcore.model.loss_scale import LossScale


class LayerOptimizer:
    """The optimizer of one layer; its state moves with the layer."""

    def __init__(self, module: Any, spec: ModelSpec, groups: ProcessGroupCollection):
        config = spec.optimizer_config
        if config.use_distributed_optimizer:
            raise ConfigError(
                "--use-distributed-optimizer is not supported yet: a lost rank would take its optimizer shard with "
                "it. Leave the flag out; see docs/not-yet.md."
            )
        with alone():  # Megatron would have all ranks agree on the groups of parameters
            chained = get_megatron_optimizer(
                config,
                [module],
                config_overrides=spec.config_overrides,
                use_gloo_process_groups=False,
                pg_collection=groups,
            )
        self._megatron: list[Any] = chained.chained_optimizers
        """One, and another one for experts that are spread over ranks."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._names = {id(main): names[id(shown)] for one in self._megatron for shown, main in pairs(one)}
        self._model_parameters = set(module.parameters())
        take_over(self.param_groups, spec.loaded_groups)
        for one in self._megatron:
            one.grad_scaler = None  # there is one for all layers (``model/loss_scale.py``)
            if one.optimizer is not None:  # there are parameters
                _create_state(one.optimizer, spec.moments)
        self._moments = spec.moments
        self.parking = Parking([tensor for tensor in self._state_tensors().values() if tensor.dim()])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self._megatron for group in one.param_groups]

    def _states(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        return [
            (p, one.optimizer.state[p])
            for one in self._megatron
            for group in one.param_groups
            for p in group["params"]
        ]

    def entries(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        """(model parameter, the parameter that is optimized, its state); the two are one unless in 16 bits."""
        self.parking.fetch()
        for one in self._megatron:
            for shown, main in pairs(one):
                yield shown, main, one.optimizer.state[main]

    def reload(self) -> None:
        """Takes the model's parameters, which were loaded, as those to optimize."""
        self.parking.fetch()
        for one in self._megatron:
            one.reload_model_params()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """What the optimizer keeps, and the main parameters where they are not the model's own (16-bit training)."""
        self.parking.fetch()
        return self._state_tensors()

    def state_bytes(self) -> dict[str, int]:
        """Of each of :meth:`state_tensors`, wherever they lie."""
        return {name: tensor.nbytes for name, tensor in self._state_tensors().items()}

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for parameter, state in self._states():
            name = self._names[id(parameter)]
            if parameter not in self._model_parameters:
                tensors[f"{name}.main"] = parameter.data
            tensors |= {f"{name}.{kept}": state[kept] for kept in sorted(state)}
        return tensors

    def apply(self, scale: float) -> None:
        """One step with the gradients in ``main_grad`` times ``scale``. Local: no message is sent."""
        self.parking.fetch()
        for one in self._megatron:
            one.prepare_grads()
            gradients = [p.grad for group in one.param_groups for p in group["params"]]
            if gradients:  # an embedding whose only weight is the head's, too, has none
                torch._foreach_mul_(gradients, scale)
            with _in_full(one.optimizer, self._moments):
                one.step_with_ready_grads()
            one.zero_grad()


@contextlib.contextmanager
def _in_full(inner: torch.optim.Optimizer | None, moments: Mapping[str, torch.dtype]) -> Iterator[None]:
    """In the body ``inner`` has its ``moments`` in the type of its parameters, and steps as without them; behind it
    they are rounded to the type in which they are kept, as Transformer Engine's FusedAdam does it
    (``transformer_engine/pytorch/optimizers/fused_adam.py``, ``get_unscaled_state`` and ``_apply_scale``).
    """
    states = inner.state.items() if inner is not None and moments else ()
    kept = [(parameter, state, name, state[name]) for parameter, state in states for name in moments]
    for parameter, state, name, rounded in kept:
        state[name] = rounded.to(parameter.dtype)
    yield
    for _, state, name, rounded in kept:
        state[name] = rounded.copy_(state[name])


def _create_state(inner: torch.optim.Optimizer, moments: Mapping[str, torch.dtype]) -> None:
    """The state of each parameter, which ``inner`` would create in its first step: a layer may have to move before. Its
    ``moments`` are kept in types of their own.

    Which tensors those are is found by a step of the same optimizer with a parameter of two numbers. All of them start
    at zero; a momentum whose first value is the gradient itself (SGD) is then what it would have been, as Megatron
    sets no dampening.
    """
    for group in inner.param_groups:
        for dtype, device in {(one.dtype, one.device) for one in group["params"]}:
            parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype, device=device))
            parameter.grad = torch.zeros_like(parameter)
            tried = object.__new__(type(inner))
            tried.__dict__.update(inner.__dict__)
            tried.param_groups, tried.state = [{**group, "params": [parameter]}], defaultdict(dict)
            tried.step()
            kept = tried.state[parameter]
            counted = (
                {"step": 0} if "step" in tried.param_groups[0] else {}
            )  # by TE and Apex, for all parameters
            group.update(counted)
            for one in group["params"]:
                if (one.dtype, one.device) == (dtype, device):
                    inner.state[one] = {
                        name: torch.zeros_like(one, dtype=moments.get(name, value.dtype))
                        if value.shape == parameter.shape
                        else torch.zeros_like(value)
                        for name, value in kept.items()
                        if value is not None
                    }


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group of parameters, all but these; equal ones are equal after JSON, too."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in group.items()
        if name != "params"
    }


def take_over(groups: Sequence[dict[str, Any]], loaded: Sequence[tuple[Any, Any]]) -> None:
    """Gives each of ``groups`` what was loaded in place of the settings that it has."""
    for group in groups:
        own = settings_of(group)
        for given, instead in loaded:
            if settings_of(given) == own:
                group.update(settings_of(instead))
                break


def pairs(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(model parameter, the parameter that is optimized) of one of Megatron's optimizers."""
    for shown, main in zip(
        getattr(optimizer, "float16_groups", ()),
        getattr(optimizer, "fp32_from_float16_groups", ()),
        strict=True,
    ):
        yield from zip(shown, main, strict=True)
    whole = getattr(optimizer, "fp32_from_fp32_groups", None)
    groups = [group["params"] for group in optimizer.param_groups] if whole is None else whole
    for group in groups:
        yield from zip(group, group, strict=True)


class _ParamGroups:
    """What OptimizerParamScheduler wants of an optimizer: the parameter groups of all layers held here.

    One more group, without parameters, tells the learning rate on a rank that holds no layer.
    """

    def __init__(self, optimizers: Sequence[Any], settings: Mapping[str, Any]):
        self.none: dict[str, Any] = {**settings, "params": [], "lr": 0.0}
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.param_groups.append(self.none)


@contextlib.contextmanager
def schedule_refused(given: Any = "") -> Iterator[None]:
    """What Megatron refuses of a schedule in the body, it refuses in one message. Raises ConfigError."""
    try:
        yield
    except (AssertionError, TypeError) as error:
        at = traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(
            f"Megatron refuses this learning rate schedule: {error or at} {given}. The warm-up must be shorter than "
            "the decay (--lr-warmup-iters or -samples below --lr-decay-iters or --train-iters, or -samples), --min-lr "
            "at most --lr, and --start-weight-decay at most --end-weight-decay."
        ) from error


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where training began: at nothing, or at a checkpoint."""

    step: int = 0
    samples: int = 0
    """That the schedule had counted by then; another number if batches had another size, or it was not loaded."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the groups of parameters without a rate of their own, as loaded."""
    first_step: Mapping[str, Any] = field(default_factory=dict)
    """Of the schedule, in the first step alone: Megatron takes over a checkpoint's weight decay after setting it."""


class LearningRate:
    """Megatron's scheduler as a function of the step alone, so that it survives any change of layers.

    Raises:
        ConfigError: Megatron refuses the schedule.
    """

    def __init__(self, start: Origin | None = None, **scheduler_arguments: Any):
        self._arguments = scheduler_arguments
        self._start = start or Origin()
        with schedule_refused(scheduler_arguments):
            OptimizerParamScheduler(_ParamGroups([], {}), **scheduler_arguments)

    def set(self, optimizers: Sequence[Any], step: int, batches: Batches, scale: LossScale) -> float:
        """Sets learning rate and weight decay of ``step`` (from 0), behind all that were committed, everywhere; returns
        the learning rate. Skipped steps do not count.
        """
        samples, step = batches.before(step) - scale.skipped_samples, step - scale.skipped
        start, groups = self._start, _ParamGroups(optimizers, self._start.settings)
        arguments = {**self._arguments, **(start.first_step if step == start.step else {})}
        scheduler = OptimizerParamScheduler(groups, **arguments)
        scheduler.step(increment=start.samples + samples)
        for group in groups.param_groups:
            if "step" in group:  # TE and Apex count there, and not with each parameter
                group["step"] = start.settings.get("step", 0) + step - start.step
        return float(groups.none["lr"])
