"""Computes weight gradients apart from input gradients.

While a :class:`WeightGrads` collects, the backward of one of Megatron's own linear layers computes the input gradient
only and leaves (weight, input, output gradient) behind; ``flush()`` adds the weight gradients to ``main_grad`` later,
in the order in which the fused backward would have. Norms and embeddings keep their ordinary backward. Layers of
Transformer Engine's leave a function behind (``mcore/model/te.py``).

What is computed again in a backward (recomputation) is left until the end of that alone: later weight gradients would
keep all of it, for all layers of a stage, and jobs that fit with Megatron-LM would not. Megatron's own backward would
not do: it gathers inputs where the allgather dispatcher may still have a gradient (core_v0.16.1
core/transformer/moe/token_dispatcher.py, line 275, ``use_global_buffer``).

With sequence parallelism a rank keeps its part of the input, as Megatron does, and ``flush()`` gathers the whole. The
ranks of a cell run the same program, so they gather in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from odyssey_megatron.upstream import seams
from odyssey_megatron.upstream.seam_table import CHECKPOINT_BACKWARD, LINEAR_BACKWARD

if TYPE_CHECKING:
    from odyssey_megatron.mcore.model.layers import HeldLayer

_collecting: WeightGrads | None = None
_passed: Callable[[int], None] | None = None
T = TypeVar("T")


class _Pending(NamedTuple):
    """A weight gradient that is left for later."""

    weight: torch.nn.Parameter
    input: torch.Tensor
    """[s, b, in]; if there is a ``cell``, this rank's part along s."""
    grad_output: torch.Tensor
    """[s, b, out]."""
    fused: bool
    """Whether apex's kernel multiplies and accumulates at once (--gradient-accumulation-fusion)."""
    cell: dist.ProcessGroup | None
    """The group of ranks that have the other parts of the input; None: this rank has all of it."""


class WeightGrads:
    """The deferred weight gradients of one microbatch on one worker."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._bound: list[tuple[torch.nn.Parameter, Callable[[], None]]] = []

    @contextlib.contextmanager
    def collecting(self, passed: Callable[[int], None] | None = None) -> Iterator[None]:
        """The body is the backward of this microbatch, or of what is computed again in it; ``passed``: see
        ``execute.interpreter.Compute.input_grad``.
        """
        global _collecting, _passed
        before, (_collecting, _passed) = (_collecting, _passed), (self, passed)
        try:
            yield
        finally:
            _collecting, _passed = before

    def add(self, pending: _Pending) -> None:
        self._pending.append(pending)

    def add_bound(self, weight: torch.nn.Parameter, add: Callable[[], None]) -> None:
        """Leave ``add()`` for later: it adds a weight's gradient to the buffer that existed when the backward ran."""
        self._bound.append((weight, add))

    def flush_bound(self) -> None:
        """Run what is bound to the current buffers; called before a block's buffers are replaced."""
        self._flush_bound(())

    def _flush_bound(self, waiting: Collection[int]) -> None:
        due, self._bound = _parted(self._bound, lambda one: id(one[0]) in waiting)
        while due:
            due.pop(0)[1]()

    def flush(self, waiting: Collection[int] = ()) -> None:
        """Compute the gradients left behind, and release their activations, except for the weights in ``waiting`` (by
        ``id``).
        """
        self._flush_bound(waiting)
        due, self._pending = _parted(self._pending, lambda one: id(one.weight) in waiting)
        for one, total_input in _with_total_inputs(due):
            rows = one.grad_output.flatten(0, -2)
            columns = total_input.flatten(0, -2)
            main_grad = one.weight.main_grad  # type: ignore[attr-defined]
            if one.fused:
                _apex_kernel(main_grad.dtype)(columns, rows, main_grad)
            else:
                main_grad.add_(rows.t().matmul(columns))


@dataclass(slots=True)
class Flight:
    """A microbatch between its forward and its weight gradient."""

    activation: torch.Tensor | None
    output: torch.Tensor
    weight_grads: WeightGrads
    layers_left: int
    """Number of layers whose weight gradients have not run yet."""


class Flights(dict[tuple[int, int], Flight]):
    """The flights by (microbatch, first layer)."""

    def finish(self, microbatch: int, first: int, last: int, layers: Iterable[HeldLayer]) -> None:
        """Run the weight gradients of a microbatch in layers ``[first, last)`` of one flight; ``layers``: all that the
        worker has.
        """
        start = max(begin for one, begin in self if one == microbatch and begin <= first)
        flight = self[microbatch, start]
        flight.layers_left -= last - first
        if flight.layers_left:
            others = (layer for layer in layers if not first <= layer.index < last)
            return flight.weight_grads.flush({id(weight) for one in others for weight in one.parameters()})
        del self[microbatch, start]
        flight.weight_grads.flush()

    def flush_bound(self) -> None:
        """Call ``WeightGrads.flush_bound`` for all flights."""
        for flight in self.values():
            flight.weight_grads.flush_bound()


def _parted(found: Sequence[T], stays: Callable[[T], bool]) -> tuple[list[T], list[T]]:
    """Split ``found``, in order, into what does not stay and what does."""
    kept = [stays(one) for one in found]
    return (
        [one for one, keeps in zip(found, kept, strict=True) if not keeps],
        [one for one, keeps in zip(found, kept, strict=True) if keeps],
    )


def _with_total_inputs(pending: list[_Pending]) -> Iterator[tuple[_Pending, torch.Tensor]]:
    """Each of ``pending`` with its whole input; the next input is gathered while one is multiplied."""
    gathers = map(_gather, pending)  # each gather begins when its item is asked for
    under_way = next(gathers, None)
    for one in pending:
        assert under_way is not None
        total_input, work = under_way
        under_way = next(gathers, None)
        if work is not None:
            work.wait()
        yield one, total_input


def _gather(one: _Pending) -> tuple[torch.Tensor, Any]:
    if one.cell is None:
        return one.input, None
    length, *rest = one.input.shape
    # A buffer of its own: an operation that a failure cut off may still write to it for a moment.
    total = one.input.new_empty(length * one.cell.size(), *rest)
    return total, dist.all_gather_into_tensor(total, one.input.contiguous(), group=one.cell, async_op=True)


def later(weight: torch.nn.Parameter, add: Callable[[], None]) -> None:
    """Run ``add()`` with the weight gradients of the microbatch whose backward this is, or at once if none collects."""
    if _collecting is None:
        add()
    else:
        _collecting.add_bound(weight, add)


def watch(module: torch.nn.Module, layer: int) -> None:
    """Announce, in the backward of the transformer layer ``module``, that all layers above it have been passed.

    When the gradient of its input is complete, everything that the layers above add to gradients directly (norms,
    biases, whole backwards) has been added, as autograd runs accumulation before anything else. The gradients of
    ``layer`` itself may be incomplete where its input is a leaf, as in recomputation.
    """

    def forward_begins(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(backward_came)  # type: ignore[no-untyped-call]

    def backward_came(grad: torch.Tensor) -> None:
        if _passed is not None:
            _passed(layer + 1)

    module.register_forward_pre_hook(forward_begins, with_kwargs=True)


def _apex_kernel(dtype: torch.dtype) -> Any:
    """The kernel that megatron core_v0.16.1 core/tensor_parallel/layers.py chooses. It needs a GPU, so no test here
    runs it.
    """
    from megatron.core.tensor_parallel import layers

    apex: Any = layers.fused_weight_gradient_mlp_cuda
    return apex.wgrad_gemm_accum_fp32 if dtype == torch.float32 else apex.wgrad_gemm_accum_fp16


def _left_for_itself(again: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return ``again``, a backward that computes layers once more, with their weight gradients behind it."""

    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if _collecting is None:
            return again(ctx, *grads)
        own, outer = WeightGrads(), _passed

        def passed(layer: int) -> None:
            own.flush()  # of the layers above, which may be summed at once
            if outer is not None:
                outer(layer)

        with own.collecting(passed):
            found = again(ctx, *grads)
        own.flush()
        return found

    return backward


def install() -> None:
    """Install the seams; a second call does nothing. Raises MegatronIncompatible."""
    if seams.is_applied(LINEAR_BACKWARD):
        return
    fused: Callable[..., tuple[Any, ...]] = seams.original(LINEAR_BACKWARD)

    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        if _collecting is None:
            return fused(ctx, grad_output)
        saved, weight = ctx.saved_tensors
        grad_input = grad_output.matmul(weight)
        if ctx.sequence_parallel:
            whole, grad_input = grad_input, torch.empty_like(saved)
            dist.reduce_scatter_tensor(grad_input, whole, group=ctx.tp_group)
        elif ctx.allreduce_dgrad:
            dist.all_reduce(grad_input, group=ctx.tp_group)
        if weight.requires_grad:
            _collecting.add(
                _Pending(
                    weight=weight,
                    input=saved.detach(),
                    grad_output=grad_output.detach(),
                    fused=ctx.gradient_accumulation_fusion,
                    cell=ctx.tp_group if ctx.sequence_parallel else None,
                )
            )
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        # Gradients for input, weight, bias, and whatever else this version's forward takes.
        return (grad_input, None, grad_bias) + (None,) * (len(ctx.needs_input_grad) - 3)

    seams.apply(LINEAR_BACKWARD, backward)
    seams.apply(CHECKPOINT_BACKWARD, _left_for_itself(seams.original(CHECKPOINT_BACKWARD)))
