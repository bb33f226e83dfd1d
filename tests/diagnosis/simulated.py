"""Jobs whose timings are drawn: documents of heavy-tailed length packed into microbatches, jitter as on real GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from odyssey_megatron.diagnosis.links import LinkTiming
from odyssey_megatron.diagnosis.timings import TimedWork, Timings

JITTER = (0.015, 0.021)
"""Of one forward and one backward, relative: what the healthy workers of ByteDance's trace AR have."""
_KINDS = ("forward", "backward")
_MEAN_DOCUMENT = 1200.0
"""Tokens; the lengths are lognormal with a sigma of 1.5, so that some fill a whole microbatch."""
QUADRATIC_AT = 24_000.0
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
        work = self.tokens + squares[step, replica, microbatch] / QUADRATIC_AT
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
            pieces=tuple(TimedWork(one, one + 1, name) for one in range(self.stages) for name in _KINDS),
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


LINK_JITTER = 0.06
"""Of a message, relative; one of twenty meets others on its way, and takes up to three times. Of three the fastest
counts.
"""


@dataclass(frozen=True, kw_only=True)
class SimulatedLinks:
    """A data-parallel pipeline on nodes of ``per_node`` workers, as Megatron places it: worker = stage * replicas +
    replica. Within a node a message takes a twentieth of what it does between nodes.
    """

    replicas: int = 4
    stages: int = 4
    per_node: int = 8
    steps: int = 24
    slow: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(sender, receiver) -> factor."""
    first: int = 0
    """The first step in which these are slow."""
    until: int = 10**9
    everybody: tuple[float, int] = (1.0, 0)
    """(factor, from that step on)."""
    seed: int = 0

    @property
    def nodes(self) -> dict[int, int]:
        return {worker: worker // self.per_node for worker in range(self.replicas * self.stages)}

    @property
    def links(self) -> list[tuple[int, int]]:
        down = [
            (stage * self.replicas + replica, (stage + 1) * self.replicas + replica)
            for stage in range(self.stages - 1)
            for replica in range(self.replicas)
        ]
        return down + [(below, above) for above, below in down]

    def timings(self) -> list[LinkTiming]:
        rng = np.random.default_rng(self.seed)
        shape, nodes = (self.steps, len(self.links)), self.nodes
        usual_s = np.array([5e-5 if nodes[a] == nodes[b] else 1e-3 for a, b in self.links])
        # No two links are alike: other switches, other lengths of cable.
        usual_s = usual_s * np.exp(rng.normal(0.0, 0.04, len(self.links)))
        messages = np.exp(rng.normal(0.0, LINK_JITTER, (3, *shape)))
        messages *= np.where(rng.random((3, *shape)) < 0.05, rng.uniform(1.0, 3.0, (3, *shape)), 1.0)
        seconds = usual_s * messages.min(axis=0)
        for at, link in enumerate(self.links):
            seconds[self.first : self.until, at] *= self.slow.get(link, 1.0)
        seconds[self.everybody[1] :] *= self.everybody[0]
        return [
            LinkTiming(step, *link, float(seconds[step, at]))
            for step in range(self.steps)
            for at, link in enumerate(self.links)
        ]

    def of(self, *, worker: int = -1, node: int = -1) -> list[tuple[int, int]]:
        """All links of a worker; or of a node with other nodes."""
        nodes = self.nodes
        return [
            link
            for link in self.links
            if worker in link
            or (nodes[link[0]] != nodes[link[1]] and node in (nodes[link[0]], nodes[link[1]]))
        ]
