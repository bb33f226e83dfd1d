"""Times of compute instructions, as the ranks measured them, on which a diagnosis is based."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


class TimedWork(NamedTuple):
    """A piece of work: layers ``[first, last)`` in one direction; or, without layers, work that all ranks do alike."""

    first: int
    last: int
    kind: str
    """``forward``, ``backward``, or another name of an instruction."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one instruction, or the median over like instructions of a step."""

    step: int
    worker: int
    piece: TimedWork
    seconds: float
    tokens: float = 1.0
    squares: float = 0.0
    """Sum of the squared lengths of its sequences, if these differ between microbatches."""
    microbatch: int = -1
    """The microbatch; -1: not known."""
    count: int = 1
    """Number of instructions that it is the median of."""


@dataclass(frozen=True, eq=False)
class Timings:
    """Many timings, as a column for each field.

    ``step``, ``worker`` and ``piece`` are indices into ``steps``, ``workers`` and ``pieces``.
    """

    steps: tuple[int, ...]
    workers: tuple[int, ...]
    pieces: tuple[TimedWork, ...]
    step: Numbers
    worker: Numbers
    piece: Numbers
    seconds: Floats
    tokens: Floats
    squares: Floats
    microbatch: Numbers
    count: Numbers = field(default_factory=lambda: np.ones(1, np.int64))
    """The counts of all rows, or a single one for all."""

    @classmethod
    def of(cls, rows: Iterable[Timing]) -> Timings:
        """Return ``rows`` as columns, without those that took no time: the clock may have been too coarse for them."""
        rows = [row for row in rows if row.seconds > 0 and row.tokens > 0]
        columns: tuple[Any, ...] = (
            tuple(
                zip(
                    *(
                        (r.step, r.worker, r.piece, r.seconds, r.tokens, r.squares, r.microbatch, r.count)
                        for r in rows
                    ),
                    strict=True,
                )
            )
            or ((),) * 8
        )
        steps, step = _places(columns[0])
        workers, worker = _places(columns[1])
        pieces, piece = _places(columns[2])
        return cls(
            steps=steps,
            workers=workers,
            pieces=pieces,
            step=step,
            worker=worker,
            piece=piece,
            seconds=np.array(columns[3], float),
            tokens=np.array(columns[4], float),
            squares=np.array(columns[5], float),
            microbatch=np.array(columns[6], np.int64),
            count=np.array(columns[7], np.int64),
        )

    def __len__(self) -> int:
        return len(self.seconds)

    @cached_property
    def by_worker_and_piece(self) -> Numbers:
        """A number for each row, which is the same for rows of one worker and piece."""
        return self.worker * max(1, len(self.pieces)) + self.piece

    @cached_property
    def by_worker_and_step(self) -> Numbers:
        """A number for each row, which is the same for rows of one worker and step."""
        return self.worker * max(1, len(self.steps)) + self.step


def _places(values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Numbers]:
    names = tuple(sorted(set(values)))
    at = {name: place for place, name in enumerate(names)}
    return names, np.array([at[value] for value in values], np.int64)


def medians(values: Floats, groups: Numbers, weights: Floats | None = None) -> tuple[Numbers, Floats]:
    """Return the distinct groups, ascending, and the (weighted) median of each.

    All arguments are 1-D and of equal length: ``groups`` has the group of each value, and ``weights`` are 1 by default.
    """
    order = np.lexsort((values, groups))
    values, groups = values[order], groups[order]
    weights = np.ones(len(values)) if weights is None else weights[order]
    names, first, size = np.unique(groups, return_index=True, return_counts=True)
    total = np.add.reduceat(weights, first) if len(values) else weights
    reached = np.cumsum(weights)
    before = reached[first] - weights[first]
    middle = before + total / 2
    # The mean of the values on both sides of the middle, so that an even number of them prefers neither.
    ends = first + size - 1
    low = np.minimum(np.searchsorted(reached, middle * (1 - 1e-12), "left"), ends)
    high = np.minimum(np.searchsorted(reached, middle * (1 + 1e-12), "left"), ends)
    return names, (values[np.maximum(low, first)] + values[np.maximum(high, first)]) / 2


def within(values: Floats, groups: Numbers) -> Floats:
    """Return, for each value, the median of its group."""
    names, middle = medians(values, groups)
    return middle[np.searchsorted(names, groups)]
