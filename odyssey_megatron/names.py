"""Names for people: of layers, steps and sizes.

Megatron numbers layers and iterations from 1, while plans and journals count from 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

_FEW = 16
"""The largest number of ranks or nodes that a message names."""


def layer_name(layer: int, num_layers: int) -> str:
    """Return the name of a layer of the planner's numbering; ``num_layers`` includes embedding and head."""
    return _named(num_layers).get(layer, f"layer {layer}")


def _named(num_layers: int) -> dict[int, str]:
    return {num_layers: "the tied weight", num_layers - 1: "the head", 0: "the embedding"}


def layer_names(layers: Iterable[int], num_layers: int) -> str:
    """Return the names of layers, as in ``the embedding, layers 1 to 3, layer 5 and the head``."""
    ends, named = _named(num_layers), sorted(layers)
    inner = runs_of(layer for layer in named if layer not in ends)
    runs = [f"layers {run[0]} to {run[-1]}" if len(run) > 1 else f"layer {run[0]}" for run in inner]
    behind = [ends[layer] for layer in named if layer in ends and layer]
    parts = [*(["the embedding"] if 0 in named else []), *runs, *behind]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return the ascending ``numbers`` in runs of consecutive ones."""
    runs: list[list[int]] = []
    for one in numbers:
        if runs and runs[-1][-1] == one - 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def first_few(numbers: Sequence[int]) -> tuple[Sequence[int], str]:
    """Return those of ``numbers`` that a message names, and its words for the others (``" and 3 more"``)."""
    more = len(numbers) - _FEW
    return numbers[:_FEW], f" and {more} more" if more > 0 else ""


def first_texts(texts: Sequence[str]) -> str:
    """Return the first three of ``texts`` for a message, and how many more there are."""
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")


def step_name(step: int) -> str:
    """Return a step's number in the journal together with Megatron's: ``step 7 (iteration 8)``."""
    return f"step {step} (iteration {step + 1})"


def size_text(size_bytes: int) -> str:
    """Return a size as text: in GiB (``71.6 GiB``), or to the byte below one GiB."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes:,} bytes"


def about_size_text(size_bytes: int) -> str:
    """Return a size as text in the largest unit of which it rounds to 1.0 or more: ``71.6 GiB``, ``3.2 MiB``,
    ``12.0 KiB``.
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        text = f"{size_bytes / unit:.1f}"
        if float(text) >= 1:
            return f"{text} {name}"
    return f"{size_bytes:,} bytes"


def lengths_text(counts: Iterable[tuple[int, int]]) -> str:
    """Return the lengths of pipelines as text: ``8+8+7``, or ``125x8+3x7`` if there are many.

    Args:
        counts: (length, number of pipelines in a row that have it), in the pipelines' order.
    """
    counts = list(counts)
    if sum(count for _, count in counts) <= _FEW:
        return "+".join(str(length) for length, count in counts for _ in range(count))
    of_each = Counter[int]()
    for length, count in counts:
        of_each[length] += count
    return "+".join(f"{count}x{length}" for length, count in of_each.items())
