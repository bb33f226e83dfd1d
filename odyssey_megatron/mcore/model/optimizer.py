"""Megatron's optimizer, one for each layer, driven by the norm and counts that Odyssey's agreement provides.

Clipping is done here and not by ``optimizer/clip_grads.py``: the norm must count each layer once whatever the number of
its holders (I4), and Megatron's code takes float32 gradients only.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.cluster.shapes import Each
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.model.experts import is_spread, of_one_rank
from odyssey_megatron.mcore.model.flat import Range, ranges
from odyssey_megatron.mcore.model.parking import Parking
from odyssey_megatron.plan.placing.slices import EVERYTHING, Span
from odyssey_megatron.plan.placing.stretches import is_everything
from odyssey_megatron.rebuild.world import alone
from odyssey_megatron.upstream import compat

if TYPE_CHECKING:
    from odyssey_megatron.mcore.loop.batches import Batches
    from odyssey_megatron.mcore.model.layers import ModelSpec
    from odyssey_megatron.mcore.model.loss_scale import LossScale


@dataclass(frozen=True, slots=True)
class _Kept:
    """The numbers of one parameter whose optimizer state is kept, and the tensors that Megatron optimizes for them."""

    of: Range
    is_all: bool
    """Whether these are the parameter's own tensors, in its shape; else 1-D tensors of the numbers, one part after the
    other.
    """
    shown: torch.Tensor
    main: torch.Tensor
    """The parameter that is optimized (in 32 bits); the same as ``shown`` unless training is in 16 bits."""
    inner: Any
    """torch's optimizer that has the state."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The main parameter, if it is not ``shown`` itself, and the optimizer's state, by name."""
        mains = {} if self.main is self.shown else {"main": self.main.data}
        return mains | {kept: one for kept, one in sorted(self.inner.state[self.main].items())}

    def of_part(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """Part ``number`` of ``tensor``, one of :meth:`tensors`: 1-D."""
        if not tensor.dim():
            return tensor.reshape(1)
        if self.is_all:
            return self.of.of_part(tensor, number)
        return tensor.view(self.of.parts, -1)[number if self.of.parts > 1 else 0]

    def put(self, tensor: torch.Tensor, number: int, numbers: torch.Tensor, start: int, stop: int) -> None:
        """Replace the numbers ``[start, stop)`` of the parameter in ``tensor`` by ``numbers``."""
        if not tensor.dim():
            tensor.copy_(numbers[0])
        elif self.is_all:
            self.of._replace(start=start, stop=stop).put(tensor, number, numbers)
        else:
            self.of_part(tensor, number)[start - self.of.start : stop - self.of.start].copy_(numbers)

    def show(self) -> None:
        """Give Megatron the model's current numbers and their gradient to optimize."""
        if self.is_all:
            return
        gradient = self.of.together(self.of.parameter.main_grad)  # type: ignore[attr-defined]
        self.shown.main_grad = gradient  # type: ignore[attr-defined]
        if self.of.parts == 1:
            self.shown.data = self.of.together(self.of.parameter)

    def take_over(self) -> None:
        """Take over new weights of the model."""
        if not self.is_all:
            self.shown.data.copy_(self.of.together(self.of.parameter))

    @torch.no_grad()
    def give(self) -> None:
        """Write the optimized numbers into the model; with a single part they are a view of it already."""
        if not self.is_all and self.of.parts > 1:
            for number in range(self.of.parts):
                self.of.put(self.of.parameter, number, self.of_part(self.shown.data, number))


class LayerOptimizer:
    """The optimizer of one layer, or of the ``spans`` of its numbers; its state moves with them."""

    def __init__(
        self,
        module: Any,
        spec: ModelSpec,
        groups: ProcessGroupCollection,
        spans: tuple[Span, ...] = (EVERYTHING,),
    ):
        """``module``: the layer, which knows how much of it this rank has (``HeldLayer.each``)."""
        config = spec.optimizer_config
        if config.use_distributed_optimizer:
            raise ConfigError(
                "OptimizerConfig.use_distributed_optimizer would have Megatron cut the state up, and a lost rank take "
                "its part with it. Leave it out, and pass optimizer_copies=2 to TrainingJob: slices of which each is "
                "kept twice."
            )
        with alone():  # Megatron would have all ranks agree on the parameter groups
            chained = compat.optimizer_of(config, [module], spec.config_overrides, groups, of_layer=True)
        self._megatron: list[Any] = chained.chained_optimizers
        """One of Megatron's optimizers, and another for experts that are spread over ranks; with Muon, separate ones
        for its matrices and for the rest.
        """
        self.spans = spans
        # The layer has this optimizer. If each kept the other, both would wait for Python's next collection.
        self._module = weakref.proxy(module)
        self._kept: dict[str, list[_Kept]] = defaultdict(list)
        self.is_all = is_all = is_everything(spans)
        """Whether all state of what this rank has of the layer is kept."""
        of_each: dict[str, list[Range]] = defaultdict(list)
        for one in ranges(module, self._each, spans):
            of_each[one.name].append(one)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for megatron in self._megatron:
            instead: dict[int, list[_Kept]] = {}
            for shown, main in pairs(megatron):
                name = names[id(shown)]
                instead[id(main)] = [
                    _Kept(
                        one,
                        is_all,
                        *((shown, main) if is_all else _cut(one, shown, main)),
                        megatron.optimizer,
                    )
                    for one in of_each[name]
                ]
                self._kept[name] += instead[id(main)]
            if not is_all and megatron.optimizer is not None:
                _optimize(megatron, instead)
        take_over(self.param_groups, spec.loaded_groups)
        for megatron in self._megatron:
            megatron.grad_scaler = None  # one for all layers is kept elsewhere (``model/loss_scale.py``)
            if megatron.optimizer is not None:  # it has parameters
                _create_state(megatron.optimizer, spec.moments)
        self._moments = spec.moments
        self._parkings = {
            span: Parking([tensor for _, tensor in self._of_span(span) if tensor.dim()]) for span in spans
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self._megatron for group in one.param_groups]

    @property
    def _each(self) -> Each:
        each: Each = self._module.each
        return each

    def kept(self) -> Iterator[_Kept]:
        """The numbers whose state is kept, for all parameters, by name."""
        self.fetch()
        yield from self._each_kept()

    def entries(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        """(model parameter, the parameter that is optimized, its state), for a whole layer; the first two are the same
        except in 16-bit training.
        """
        for one in self.kept():
            yield one.shown, one.main, one.inner.state[one.main]

    def reload(self) -> None:
        """Take the model's parameters, which were loaded, as those to optimize."""
        self.take_over()
        for megatron in self._megatron:
            megatron.reload_model_params()

    def take_over(self) -> None:
        """Take over new weights of the model into the tensors that are optimized here."""
        for one in self.kept():
            one.take_over()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All optimizer state of the layer, with the main parameters where they are not the model's own (16 bits)."""
        self.fetch()
        return {name: tensor for span in self.spans for name, tensor in self._of_span(span)}

    def state_bytes(self) -> int:
        """Bytes of the state, wherever it lies."""
        return sum(one.nbytes for span in self.spans for _, one in self._of_span(span))

    def part_bytes(self) -> int:
        """Bytes of a layer's whole state on a rank of a whole cell, extrapolated from what is kept here."""
        times = self._each.times_experts(of_one_rank(self._module.config)) if self._each.cuts_experts else 1.0
        numbers = {span: 0.0 for span in (EVERYTHING, *self.spans)}
        for one in ranges(self._module, self._each, numbers):
            numbers[one.span] += (one.stop - one.start) / (times if is_spread(one.parameter) else 1.0)
        here = sum(numbers[span] for span in self.spans)
        kept = sum(
            one.nbytes
            // (each.of.parts if one.dim() else 1)
            / (times if is_spread(each.of.parameter) else 1.0)
            for each in self._each_kept()
            for one in each.tensors().values()
        )
        return round(kept * numbers[EVERYTHING] / here) if here else 0

    def _each_kept(self) -> Iterator[_Kept]:
        for _, own in sorted(self._kept.items()):
            yield from own

    def _of_span(self, span: Span) -> Iterator[tuple[str, torch.Tensor]]:
        for one in self._each_kept():
            if one.of.span == span:
                yield from ((f"{one.of.name}.{kept}", tensor) for kept, tensor in one.tensors().items())

    # -- slices ---------------------------------------------------------------------------------------------------

    def numbers(self, number: int, span: Span) -> dict[str, torch.Tensor]:
        """The state kept for ``span`` of part ``number``, by parameter and kind: 1-D tensors, in place or copies."""
        self.fetch()
        found: dict[str, torch.Tensor] = {}
        for wanted in ranges(self._module, self._each, [span], number):
            pieces: dict[str, list[torch.Tensor]] = defaultdict(list)
            for one in self._kept.get(wanted.name, ()):
                start, stop = max(one.of.start, wanted.start), min(one.of.stop, wanted.stop)
                if start < stop:
                    for kept, tensor in one.tensors().items():
                        part, at = one.of_part(tensor, number), one.of.start
                        pieces[kept].append(part[start - at : stop - at] if tensor.dim() else part)
            for kept, own in pieces.items():
                counts = kept == "step"  # the same in all pieces
                found[f"{wanted.in_whole}.{kept}"] = own[0] if counts or len(own) == 1 else torch.cat(own)
        return found

    def stepped(self, number: int, span: Span) -> dict[str, torch.Tensor]:
        """All that a step makes of ``span`` of part ``number``: :meth:`numbers`, and the weights by parameter."""
        own = ranges(self._module, self._each, [span], number)
        return self.numbers(number, span) | {one.in_whole: one.of_part(one.parameter, number) for one in own}

    @torch.no_grad()
    def put(self, number: int, span: Span, given: Mapping[str, torch.Tensor]) -> None:
        """Take over what :meth:`numbers` of ``span`` has returned, here or on another rank."""
        self.fetch()
        for wanted in ranges(self._module, self._each, [span], number):
            for one in self._kept.get(wanted.name, ()):
                start, stop = max(one.of.start, wanted.start), min(one.of.stop, wanted.stop)
                if start < stop:
                    for kept, tensor in one.tensors().items():
                        numbers = given[f"{wanted.in_whole}.{kept}"]
                        cut = numbers[start - wanted.start : stop - wanted.start] if tensor.dim() else numbers
                        one.put(tensor, number, cut, start, stop)

    # -- where it lies --------------------------------------------------------------------------------------------

    def park(self, spans: Iterable[Span]) -> None:
        """Move the state of ``spans`` to the host until it is needed."""
        for span in spans:
            self._parkings[span].park()

    def fetch(self) -> None:
        """Move all of the state to the device."""
        for one in self._parkings.values():
            one.fetch()

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[None]:
        """In the body all of the state is on the device; afterwards it lies where it lay before."""
        with contextlib.ExitStack() as stack:
            for one in self._parkings.values():
                stack.enter_context(one.at_hand())
            yield

    @property
    def host_bytes(self) -> int:
        """Bytes of state that lie on the host now."""
        return sum(one.host_bytes for one in self._parkings.values())

    def apply(self, scale: float) -> None:
        """Make one step with the gradients in ``main_grad`` times ``scale``. Local: no message is sent."""
        for one in self.kept():
            one.show()
        for megatron in self._megatron:
            megatron.prepare_grads()
            gradients = [p.grad for group in megatron.param_groups for p in group["params"]]
            if gradients:  # an embedding whose only weight is shared with the head has no gradients
                torch._foreach_mul_(gradients, scale)
            with _in_full(megatron.optimizer, self._moments):
                megatron.step_with_ready_grads()
            megatron.zero_grad()
        for one in self.kept():
            one.give()


def _cut(of: Range, shown: torch.Tensor, main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers ``of`` a parameter as a parameter of their own, and the same for what is optimized in its place."""
    own = torch.nn.Parameter(of.together(shown))
    return own, own if shown is main else torch.nn.Parameter(of.together(main).clone())


def _optimize(megatron: Any, instead: Mapping[int, Sequence[_Kept]]) -> None:
    """Make one of Megatron's optimizers, which has made no step yet, optimize other tensors; ``instead`` maps the
    ``id`` of each main parameter to what replaces it.
    """
    names = ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups")
    shown, mains, others = (getattr(megatron, name, []) for name in names)
    for model, optimized in zip(shown, mains, strict=True):
        model[:] = [one.shown for main in optimized for one in instead[id(main)]]
        optimized[:] = [one.main for main in optimized for one in instead[id(main)]]
    for group in (*others, *(group["params"] for group in megatron.optimizer.param_groups)):
        group[:] = [one.main for main in group for one in instead[id(main)]]


@contextlib.contextmanager
def _in_full(inner: torch.optim.Optimizer | None, moments: Mapping[str, torch.dtype]) -> Iterator[None]:
    """In the body ``inner`` has its ``moments`` in the type of its parameters, so that it steps as usual; afterwards
    they are rounded to the type in which they are kept. Transformer Engine's FusedAdam does the same
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
    """Create the state that ``inner`` would create in its first step, since a layer may have to move before that. Its
    ``moments`` are kept in types of their own.

    A step of the same optimizer with a parameter of four numbers shows which tensors it keeps. All of them start at
    zero. For a momentum that starts as the first gradient (SGD) that makes no difference, as Megatron sets no
    dampening.
    """
    for group in inner.param_groups:
        for dtype, device in {(one.dtype, one.device) for one in group["params"]}:
            counts, kept = _tried(inner, group, dtype, device)
            if counts:
                group.setdefault("step", 0)
            for one in group["params"]:
                if (one.dtype, one.device) == (dtype, device):
                    inner.state[one] = {
                        name: torch.zeros_like(one, dtype=moments.get(name, value.dtype))
                        if len(value.shape) == 2
                        else torch.zeros_like(value)
                        for name, value in kept.items()
                        if value is not None
                    }


def count_steps(inner: torch.optim.Optimizer) -> None:
    """Have the parameter groups of ``inner`` count their steps, from 0 on, if it is of a class that counts there (those
    of TE and apex) and not with each parameter. A new optimizer begins to in its first step.
    """
    for group in inner.param_groups:
        counts, _ = _tried(inner, group, torch.float32, torch.device(torch.cuda.current_device()))
        if counts:
            group.setdefault("step", 0)


def _tried(
    inner: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[bool, dict[str, torch.Tensor]]:
    """What a step of ``inner`` does to a parameter of four numbers, [2, 2], with the settings of ``group``, except for
    its rate, which may be too large for ``dtype``.

    Returns:
        Whether the group then counts steps, and what is kept of the parameter.
    """
    parameter = torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    tried = object.__new__(type(inner))
    tried.__dict__.update(inner.__dict__)
    tried.param_groups, tried.state = [{**group, "lr": 0.0, "params": [parameter]}], defaultdict(dict)
    tried.step()
    return "step" in tried.param_groups[0], tried.state[parameter]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """All entries of a parameter group but its parameters; equal groups give equal settings after a trip through JSON,
    too.
    """
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in group.items()
        if name != "params"
    }


def take_over(groups: Sequence[dict[str, Any]], loaded: Sequence[tuple[Any, Any]]) -> None:
    """Replace the settings of each of ``groups`` by those that were loaded for it."""
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
    """What OptimizerParamScheduler needs of an optimizer: the parameter groups of all layers held here.

    One more group, without parameters, gives the learning rate on a rank that holds no layer.
    """

    def __init__(self, optimizers: Sequence[Any], settings: Mapping[str, Any]):
        self.none: dict[str, Any] = {**settings, "params": [], "lr": 0.0}
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.param_groups.append(self.none)


@contextlib.contextmanager
def schedule_refused(given: Any = "") -> Iterator[None]:
    """Turn whatever Megatron raises about a schedule in the body into one message. Raises ConfigError."""
    try:
        yield
    except (AssertionError, TypeError) as error:
        what = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        what = f"{what} {given}".strip()
        raise ConfigError(
            f"Megatron refuses this learning rate schedule: {what}. The warm-up must be shorter than "
            "the decay (--lr-warmup-iters or -samples below --lr-decay-iters or --train-iters, or -samples), --min-lr "
            "at most --lr, and --start-weight-decay at most --end-weight-decay."
        ) from error


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where training began: at nothing, or at a checkpoint."""

    step: int = 0
    samples: int = 0
    """Samples that the schedule had counted by then; not those of ``step`` if batches had another size, or if the
    schedule was not loaded.
    """
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Loaded settings of the parameter groups that have no rate of their own."""
    first_step: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the schedule in the first step alone: Megatron takes over a checkpoint's weight decay after setting
    it.
    """


class LearningRate:
    """Megatron's scheduler as a function of the step alone, so that it survives any change of layers.

    Raises:
        ConfigError: Megatron refuses the schedule.
    """

    def __init__(self, start: Origin | None = None, **scheduler_arguments: Any):
        self._arguments = scheduler_arguments
        self._start = start or Origin()
        with schedule_refused(scheduler_arguments):
            OptimizerParamScheduler(cast(Any, _ParamGroups([], {})), **scheduler_arguments)

    def set(self, optimizers: Sequence[Any], step: int, batches: Batches, scale: LossScale) -> float:
        """Set the learning rate and weight decay of ``step`` (counted from 0) in all groups, and return the learning
        rate. Skipped steps do not count.
        """
        samples, step = batches.before(step) - scale.skipped_samples, step - scale.skipped_steps
        start, groups = self._start, _ParamGroups(optimizers, self._start.settings)
        arguments = {**self._arguments, **(start.first_step if step == start.step else {})}
        scheduler = OptimizerParamScheduler(cast(Any, groups), **arguments)
        scheduler.step(increment=start.samples + samples)
        for group in groups.param_groups:
            if "step" in group:  # TE and Apex count there instead of with each parameter
                group["step"] = start.settings.get("step", 0) + step - start.step
        return float(groups.none["lr"])
