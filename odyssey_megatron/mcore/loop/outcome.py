"""Results of a step or an evaluation over all ranks: each parameter and each microbatch counts once (I4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.model import experts
from odyssey_megatron.mcore.model.flat import is_duplicated, ranges
from odyssey_megatron.mcore.model.layers import HeldLayer, LayerBlock, main_grad
from odyssey_megatron.mcore.pinned import to_device
from odyssey_megatron.plan.placing.slices import Span

Losses = Mapping[int, Mapping[str, torch.Tensor]]
"""Microbatch -> what its forward step reported: for each name a value, or a sum and a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What is logged of a committed step."""

    losses: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    """None if it is not finite: the step is ``skipped``."""
    lr: float
    skipped: bool
    """Whether no weight has changed: the loss scale was too large for the step, or it was to be left out."""
    num_zeros_in_grad: int | None = None
    """None unless Megatron's ``log_num_zeros_in_grad`` asks for it."""
    tokens: int = 0
    num_microbatches: int = 0
    sequences: tuple[float, float] | tuple[None, None] = (None, None)
    """Sum of the lengths of packed sequences, and sum of their squares; None where a sample is one sequence."""
    dealt: tuple[float, float] | None = None
    """Costs of the most expensive route before and after dealing: see ``Balance.seen``."""
    max_attention_logit: float = 0.0
    """0 unless Megatron's ``log_max_attention_logit`` asks for it."""
    aux_losses: dict[str, list[float]] = field(default_factory=dict)
    """For a mixture of experts: name -> for each transformer layer, the sum over all microbatches."""


def known_to_all(original: object, stat: float | None, group: object = None) -> float | None:
    """Replaces Megatron's ``reduce_max_stat_across_model_parallel_group`` for a number of a step: all ranks, also those
    without layers, have the same one already. It is logged in float32, as if it had been sent.
    """
    return None if stat is None else torch.tensor(stat, dtype=torch.float32).item()


# -- the totals of a step: [squared gradient norm, zeros in the gradient, tokens, microbatches, sum of the lengths of
#    packed sequences, of their squares, (loss sum, loss count) for each name], float64, summed over all ranks with the
#    step's agreement

_BEFORE_LOSSES = 6
_AT_ONCE = 2**24
"""The most numbers of which a norm is taken at once; their copy has 128 MiB."""


def num_totals(loss_names: Sequence[str]) -> int:
    return _BEFORE_LOSSES + 2 * len(loss_names)


def _pieces(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return ``numbers``, of any shape, in 1-D pieces. A norm in float64 copies what it is taken of, and a stage's
    gradients are gigabytes, for whose copy no plan leaves room.
    """
    return torch.split(numbers.reshape(-1), _AT_ONCE)


def local_totals(
    gradients: Iterable[tuple[torch.Tensor, int]],
    losses: Losses,
    loss_names: Sequence[str],
    *,
    tokens: Iterable[torch.Tensor | float],
    sequences: Mapping[int, tuple[float, float]],
    cell: Cell,
    with_zeros: bool,
) -> torch.Tensor:
    """This rank's share of a step's totals: 1-D, float64.

    Args:
        gradients: see :func:`counted_gradients`.
        losses: those of the microbatches whose head this worker ran, or of this rank's part of their sequences.
        tokens: the number of tokens of each of these microbatches.
        sequences: as :attr:`StepOutcome.sequences`, for each microbatch with packed sequences that was read here.
        cell: this rank's. The first tensor-parallel rank counts what all of them have alike; the first context-parallel
            rank counts the microbatches; and a loss that is not a sum counts once for each part of a sequence that is
            here.
        with_zeros: count zeros in the gradient.
    """
    totals = torch.zeros(num_totals(loss_names), dtype=torch.float64, device=torch.cuda.current_device())
    for gradient, times in gradients:
        for piece in _pieces(gradient):
            totals[0] += times * torch.linalg.vector_norm(piece, dtype=torch.float64).square()
            if with_zeros:
                totals[1] += times * (piece.numel() - torch.count_nonzero(piece))
    if cell.tensor_rank:
        return totals
    for one in tokens:
        totals[2] += one
    totals[3] = 0 if cell.context_rank else len(losses)
    for microbatch, reported in sorted(losses.items()):
        if not cell.context_rank and microbatch in sequences:
            for at, one in enumerate(sequences[microbatch], start=4):
                totals[at] += one
        for index, name in enumerate(loss_names):
            value = reported[name].detach().to(torch.float64)
            alone = cell.context_each * torch.stack([value, torch.ones_like(value)])
            pair = value if value.numel() == 2 else alone
            totals[_BEFORE_LOSSES + 2 * index :][:2] += pair
    return totals


def means(losses: Sequence[float], loss_names: Sequence[str]) -> dict[str, float]:
    """The losses of a step, from the end of its totals."""
    return {
        name: losses[2 * i] / losses[2 * i + 1] if losses[2 * i + 1] else math.nan
        for i, name in enumerate(loss_names)
    }


def shown(result: StepOutcome, loss_names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The losses of a step under ``loss_names``, each [1], float32, on the device, for Megatron to add to its sums."""
    return {
        name: to_device(torch.tensor([value], dtype=torch.float32))
        for name, value in result.losses.items()
        if name in loss_names
    }


def checked(reported: dict[str, torch.Tensor], loss_names: Sequence[str]) -> dict[str, torch.Tensor]:
    """What a forward step has ``reported``, each loss 0-D, or 1-D with a sum and a count. Raises ConfigError if it has
    other names or shapes.
    """
    if set(reported) != set(loss_names):
        raise ConfigError(
            f"the forward step reports {sorted(reported)}, expected {sorted(loss_names)}. Pass the names as "
            "loss_names; with an unmodified Megatron-LM script only these can be reported yet."
        )
    for name, value in reported.items():
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.numel() not in (1, 2):
            what = f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise ConfigError(
                f"the forward step reports {name!r} as {what}. Report a tensor of one number, or of two: a sum and a "
                "count."
            )
    return {name: value.reshape(() if value.numel() == 1 else 2) for name, value in reported.items()}


def counted_gradients(block: LayerBlock, cell: Cell) -> list[tuple[torch.Tensor, int]]:
    """The gradients of ``block`` that this rank of its first holder counts, of any shape, each with the number of times
    that it counts.

    A gradient that the first tensor-parallel rank counts for all of them counts 0 times elsewhere, but is in the list:
    if it is not finite, so is the total.
    """
    if cell.index == 0 and cell.tensor_each == 1:  # it counts each once
        return [(one, 1) for one in (*block.buffers, *block.expert_buffers)]
    parameters = [parameter for layer in block.layers for parameter in layer.parameters()]
    return [(main_grad(one), times) for one in parameters if (times := _times(one, cell)) is not None]


def counted_numbers(layer: HeldLayer, spans: Sequence[Span], cell: Cell) -> list[tuple[torch.Tensor, int]]:
    """The same for slices of ``layer``, 1-D, on a rank of their first owner."""
    return [
        (one.together(main_grad(one.parameter)), times)
        for one in ranges(layer, cell.parts.each, spans)
        if (times := _times(one.parameter, cell, cut=True)) is not None
    ]


def _times(parameter: torch.Tensor, cell: Cell, *, cut: bool = False) -> int | None:
    """The number of times that this rank counts ``parameter``: 0 if it is a duplicate that another tensor-parallel rank
    counts (megatron core_v0.16.1 tensor_parallel/layers.py, ``param_is_not_tensor_parallel_duplicate``), None if
    another rank has the same gradient sums. What is marked as cut is counted by each rank of a whole cell.

    ``cut``: ranks that have the same share out the sums (``plan/placing/stretches.py``).
    """
    spread = experts.is_spread(parameter)
    if not cut and cell.index >= (cell.expert_parts if spread else cell.tensor):
        return None
    is_first = cell.index % ((cell.expert_tensor or cell.tensor) if spread else cell.tensor) == 0
    if is_duplicated(parameter):
        return cell.tensor_each
    return int(is_first or getattr(parameter, "tensor_model_parallel", False))


def squared_weights(
    layers: Iterable[tuple[HeldLayer, Sequence[Span]]], cell: Cell, *, cut: bool
) -> torch.Tensor:
    """The sum of the squared parameters that this rank counts, in the given slices of ``layers``: [1], float64. The
    parameters are those that are optimized, or, for fp16, the model's, as in Megatron. ``cut``: see :func:`_times`.
    """
    total = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    for layer, spans in layers:
        for one in layer.optimizer.kept() if layer.optimizer is not None else ():
            if one.of.span in spans and (times := _times(one.of.parameter, cell, cut=cut)):
                weight = one.shown if layer.config.fp16 else one.main
                for piece in _pieces(weight.detach()):
                    total += times * torch.linalg.vector_norm(piece, dtype=torch.float64).square()
    return total


# -- what the microbatches of an evaluation reported: [microbatches x parts of a sequence, names, (value, count,
#    number of values that the forward step gave)], float64, summed over all ranks. Each rank's part of a sequence has
#    a row of its own: Megatron combines them, with --sft by a mean of means. A rank of a smaller cell that has several
#    parts reports a mean in the rows of all of them, but a sum only once


def loss_table(losses: Losses, loss_names: Sequence[str], num_microbatches: int, cell: Cell) -> torch.Tensor:
    """This rank's share of the table above; context-parallel ranks of ``cell`` have a part of a microbatch each."""
    shape = (num_microbatches, cell.full_context, len(loss_names), 3)
    table = torch.zeros(shape, dtype=torch.float64, device=torch.cuda.current_device())
    for microbatch, reported in losses.items():
        for index, name in enumerate(loss_names):
            value = reported[name].detach().reshape(-1)
            rows = table[microbatch, cell.held_contexts.start : cell.held_contexts.stop, index]
            rows[:, 2] = value.numel()
            rows[: 1 if value.numel() == 2 else len(rows), : value.numel()] = value.to(table.dtype)
    return table.flatten(0, 1)


def losses_of(table: torch.Tensor, loss_names: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """What each rank's part of each microbatch reported: by name [1], or [2] with a sum and a count, float32. ``table``
    is the sum of all ranks' shares.
    """
    return [
        {name: row[index, : int(row[index, 2])].to(torch.float32) for index, name in enumerate(loss_names)}
        for row in table
    ]
