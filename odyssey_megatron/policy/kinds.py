"""Kinds of pipelines: how many stages they have, and whether one of their workers is slow.

A kind is a number. That of pipelines whose workers are alike is how many stages they have; that of pipelines one of
whose workers is slow has besides, above the lowest sixteen bits, which sort of slow worker it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odyssey_megatron.cluster.state import WHOLE_CELL, Share

_BITS = 16
_STEPS = 100
"""Of speeds, what is below a hundredth makes no other sort."""

MOST_SLOW = 8
"""Slow workers that are looked at one by one, the fastest ones; others idle, or are treated like the rest."""


@dataclass(frozen=True, slots=True, order=True)
class Slow:
    """A sort of slow workers."""

    speed: float
    """Beside a healthy whole cell."""
    share: Share = WHOLE_CELL

    @classmethod
    def of(cls, speed: float, share: Share) -> Slow:
        """Its sort: as fast as the slowest of them."""
        return cls(max(1, int(speed * _STEPS + 1e-6)) / _STEPS, share)


def mixed(stages: int, sort: int) -> int:
    """The kind of pipelines of so many stages, one of which has a slow worker of ``sort``, from 0 on."""
    return stages + (sort + 1 << _BITS)


def stages_of(kind: int) -> int:
    """How many workers a pipeline of this kind has, the slow one included."""
    return kind & ((1 << _BITS) - 1)


def sort_of(kind: int) -> int:
    """Which sort of slow worker is one of them; -1: none."""
    return (kind >> _BITS) - 1


def healthy_of(kind: int) -> int:
    """How many of its workers are not slow."""
    return stages_of(kind) - (sort_of(kind) >= 0)


class Sorts:
    """The sorts of slow workers that one search and all that go with it know, by number."""

    def __init__(self) -> None:
        self._known: dict[Slow, int] = {}

    def numbers(self, slow: Sequence[Slow]) -> tuple[int, ...]:
        """Of each."""
        return tuple(self._known.setdefault(one, len(self._known)) for one in slow)

    def __getitem__(self, number: int) -> Slow:
        return [*self._known][number]
