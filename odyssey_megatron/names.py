"""How people count: layers and iterations as Megatron numbers them, from 1, where plans and journals begin at 0; and
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_FEW = 16
"""Of a large job, ranks or nodes that a message names."""


def layer_name(layer: int, num_layers: int) -> str:
    """A planner's layer in words; ``num_layers`` counts embedding and head, too."""
    return _named(num_layers).get(layer, f"layer {layer}")


def _named(num_layers: int) -> dict[int, str]:
    return {num_layers: "the tied weight", num_layers - 1: "the head", 0: "the embedding"}


def layer_names(layers: Iterable[int], num_layers: int) -> str:
    """``the embedding, layers 1 to 3, layer 5 and the head``."""
    ends, inner = _named(num_layers), list[list[int]]()
    named = sorted(layers)
    for layer in named:
        if layer in ends:
            continue
        if inner and inner[-1][-1] == layer - 1:
            inner[-1].append(layer)
        else:
            inner.append([layer])
    runs = [f"layers {run[0]} to {run[-1]}" if len(run) > 1 else f"layer {run[0]}" for run in inner]
    behind = [ends[layer] for layer in named if layer in ends and layer]
    parts = [*(["the embedding"] if 0 in named else []), *runs, *behind]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def first_few(numbers: Sequence[int]) -> tuple[Sequence[int], str]:
    """Those of ``numbers`` that a message names, and what it says of the others."""
    more = len(numbers) - _FEW
    return numbers[:_FEW], f" and {more} more" if more > 0 else ""


def step_name(step: int) -> str:
    """A step of the journal, and Megatron's name for it."""
    return f"step {step} (iteration {step + 1})"


def size_text(size_bytes: int) -> str:
    """``71.6 GiB``, and what is small to the byte."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes:,} bytes"


def lengths_text(counts: Iterable[tuple[int, int]]) -> str:
    """Of pipelines, so many stages each and how many there are in a row: ``8+8+7``; ``125x8+3x7`` where there are
    many.
    """
    counts = list(counts)
    if sum(count for _, count in counts) <= _FEW:
        return "+".join(str(length) for length, count in counts for _ in range(count))
    of_each: dict[int, int] = {}
    for length, count in counts:
        of_each[length] = of_each.get(length, 0) + count
    return "+".join(f"{count}x{length}" for length, count in of_each.items())
