"""Kinds of pipelines: the number of stages, and which sort of slow worker is in it, if any.

A kind is a number. If all workers are alike, it is the number of stages. If one worker is slow, the bits above the
lowest sixteen say which sort of slow worker it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odyssey_megatron.cluster.state import WHOLE_CELL, Share

_BITS = 16
_STEPS = 100
"""Number of steps in which speeds are told apart: differences below a hundredth make no other sort."""

MOST_SLOW = 8
"""Number of slow workers, the fastest ones, that are considered one by one; others idle, or are
treated like the rest.
"""


@dataclass(frozen=True, slots=True, order=True)
class Slow:
    """A sort of slow workers: those of about the same speed and share."""

    speed: float
    """Relative to a healthy whole cell."""
    share: Share = WHOLE_CELL

    @classmethod
    def of(cls, speed: float, share: Share) -> Slow:
        """Return the sort of such a worker, whose speed is rounded down."""
        return cls(max(1, int(speed * _STEPS + 1e-6)) / _STEPS, share)


def mixed(stages: int, sort: int) -> int:
    """Return the kind of pipelines with ``stages`` workers, one of them a slow one of ``sort``, which counts from 0."""
    return stages + (sort + 1 << _BITS)


def stages_of(kind: int) -> int:
    """Return the number of workers of such a pipeline, the slow one included."""
    return kind & ((1 << _BITS) - 1)


def sort_of(kind: int) -> int:
    """Return the sort of the slow worker in such a pipeline; -1 if there is none."""
    return (kind >> _BITS) - 1


def healthy_of(kind: int) -> int:
    """Return the number of workers of such a pipeline that are not slow."""
    return stages_of(kind) - (sort_of(kind) >= 0)


class Sorts:
    """The sorts of slow workers, by number, that are known to one search and its parts."""

    def __init__(self) -> None:
        self._known: dict[Slow, int] = {}

    def numbers(self, slow: Sequence[Slow]) -> tuple[int, ...]:
        """Return the number of each sort; new ones get the next numbers."""
        return tuple(self._known.setdefault(one, len(self._known)) for one in slow)

    def known(self, slow: Sequence[Slow]) -> tuple[int, ...] | None:
        """Return the same without giving any number; None if one has none yet."""
        return tuple(self._known[one] for one in slow) if self._known.keys() >= {*slow} else None

    def __getitem__(self, number: int) -> Slow:
        return [*self._known][number]
