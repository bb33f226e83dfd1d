"""Jobs whose timings are drawn: documents of heavy-tailed length packed into microbatches, jitter as on real GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from odyssey_megatron.diagnosis.timings import Piece, Timings

JITTER = (0.015, 0.021)
"""Of one forward and one backward, relative: what the healthy workers of ByteDance's trace AR have."""
_KINDS = ("forward", "backward")
_MEAN_DOCUMENT = 1200.0
"""Tokens; the lengths are lognormal with a sigma of 1.5, so that some fill a whole microbatch."""
_QUADRATIC_AT = 24_000.0
"""The sequence length at which attention scores cost as much as all else, about that of a 7B model."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A data-parallel pipeline. Worker = replica * stages + stage."""

    replicas: int = 4
    stages: int = 4
    microbatches: int = 8
    """Of one replica in a step."""
    steps: int = 24
    tokens: int = 8192
    """Of a microbatch; documents are packed into it and cut at its end."""
    slow: Mapping[int, tuple[float, int, int]] = field(default_factory=dict)
    """Worker -> (factor, first step, first step that is healthy again)."""
    dear: Mapping[int, float] = field(default_factory=dict)
    """Stage -> how much dearer than the others."""
    everybody: tuple[float, int] = (1.0, 0)
    """(factor, from that step on)."""
    lengths_known: bool = True
    seed: int = 0

    def timings(self) -> Timings:
        rng = np.random.default_rng(self.seed)
        shape = (self.steps, self.replicas, self.microbatches, self.stages, 2)
        squares = self._squares(rng, shape[:3])
        step, replica, microbatch, stage, kind = (one.ravel() for one in np.indices(shape))
        worker = replica * self.stages + stage
        work = self.tokens + squares[step, replica, microbatch] / _QUADRATIC_AT
        seconds = (
            1e-5 * work * np.where(kind == 0, 1.0, 1.9) * np.exp(rng.normal(0.0, np.array(JITTER)[kind]))
        )
        # Chips are not alike either.
        seconds *= np.exp(rng.normal(0.0, 0.004, self.replicas * self.stages))[worker]
        for who, (factor, first, until) in self.slow.items():
            seconds[(worker == who) & (step >= first) & (step < until)] *= factor
        for where, factor in self.dear.items():
            seconds[stage == where] *= factor
        seconds[step >= self.everybody[1]] *= self.everybody[0]
        known = self.lengths_known
        return Timings(
            steps=tuple(range(self.steps)),
            workers=tuple(range(self.replicas * self.stages)),
            pieces=tuple(Piece(one, one + 1, name) for one in range(self.stages) for name in _KINDS),
            step=step,
            worker=worker,
            piece=stage * 2 + kind,
            seconds=seconds,
            tokens=np.full(len(seconds), float(self.tokens) if known else 1.0),
            squares=squares[step, replica, microbatch] if known else np.zeros(len(seconds)),
            microbatch=microbatch,
        )

    def _squares(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Of each microbatch the sum of its documents' squared lengths."""
        count = int(np.prod(shape))
        left, found = np.full(count, float(self.tokens)), np.zeros(count)
        while (left > 0).any():
            length = np.minimum(left, _MEAN_DOCUMENT * np.exp(rng.normal(-1.125, 1.5, count)) + 1)
            found += length**2
            left -= length
        return found.reshape(shape)


def until(timings: Timings, step: int) -> Timings:
    """What had been measured when ``step`` was through."""
    keep = timings.step <= step
    columns = {
        name: getattr(timings, name)[keep]
        for name in ("step", "worker", "piece", "seconds", "tokens", "squares", "microbatch")
    }
    return Timings(steps=timings.steps[: step + 1], workers=timings.workers, pieces=timings.pieces, **columns)
