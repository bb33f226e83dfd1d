"""Tensor parallelism that shrinks: which ranks of a damaged cell to keep."""

from __future__ import annotations

from collections.abc import Mapping


def best_tensor_parallel(
    speeds: Mapping[int, float], *, least: int = 1, divides: int = 0
) -> tuple[float, tuple[int, ...]]:
    """The subset of a cell's living ranks that computes fastest, and its speed in ranks of speed 1.

    All ranks of a cell wait for each other, so k ranks give k times the slowest of them; k is a power of two of
    at least ``least`` (from memory) that divides ``divides`` (attention heads or groups; 0 = any). Left-over
    ranks are spares of the node. Source: ResiHP Eq. 3-4, papers.md §8.4.

    Args:
        speeds: rank -> relative speed, of the living ranks only.

    Returns:
        (0.0, ()) if no allowed size is left.
    """
    fastest = sorted(speeds, key=lambda rank: (-speeds[rank], rank))
    best: tuple[float, tuple[int, ...]] = (0.0, ())
    size = 1
    while size <= len(fastest):
        if size >= least and (divides == 0 or divides % size == 0):
            kept = fastest[:size]
            speed = size * min(speeds[rank] for rank in kept)
            if speed > best[0]:
                best = (speed, tuple(sorted(kept)))
        size *= 2
    return best
