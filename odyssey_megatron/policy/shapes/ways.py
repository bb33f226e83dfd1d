"""The layers of each worker of a pipeline, if a microbatch goes through its workers once or more often.

A :class:`Way` has legs, which have equally many layers. One leg is the usual pipeline. Two that turn are a V, down the
workers and up again, and four a W. Two or four that do not turn all go down the workers, as Megatron's interleaved
schedule does. Workers get consecutive parts of one sequence, in which the legs take turns: in a V the first layer of
the way down, the last of the way up, the second of the way down, and so on. So each worker has neighbouring layers of
each leg. Where a leg turns the worker has the layers of two legs in one visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

from odyssey_megatron.plan.layout import Hop, Route


class Way(NamedTuple):
    """How routes go through the workers of a pipeline."""

    legs: int = 1
    turns: bool = False
    """Whether each other leg goes up the workers. Then the first of them has embedding and head."""

    @property
    def text(self) -> str:
        """The way for tables, behind "4 pipelines"; empty if it has one leg."""
        return _TEXTS[self]


ONCE, V, W = Way(), Way(2, turns=True), Way(4, turns=True)
_TEXTS = {
    ONCE: "",
    V: " in a V",
    W: " in a W",
    Way(2): " interleaved twice",
    Way(4): " interleaved four times",
}
MORE = tuple(way for way in _TEXTS if way != ONCE)
"""The ways with more than one leg."""

Visit = tuple[int, int, int]
"""(place of the worker in its pipeline, first layer, last)."""


@lru_cache(maxsize=64)
def in_turn(last: int, way: Way) -> tuple[int, ...]:
    """Return the layers before ``last`` in the order in which a pipeline with this way is cut.

    If it turns, the outermost legs come first, so that the first worker gets embedding and head with a transformer
    layer each. If not, the first worker gets the embedding, and the last one the head.
    """
    legs = [
        range(b - 1, a - 1, -1) if way.turns and i % 2 else range(a, b)
        for i, (a, b) in enumerate(pairwise(_edges(last, way.legs)))
    ]
    if way.turns:
        legs.insert(1, legs.pop())
    longest = max(map(len, legs))
    return tuple(leg[depth] for depth in range(longest) for leg in legs if depth < len(leg))


def _edges(last: int, legs: int) -> list[int]:
    return [last * leg // legs for leg in range(legs + 1)]


def legs_of(last: int, legs: int) -> list[int]:
    """Return the leg of each layer before ``last``."""
    return [leg for leg, (a, b) in enumerate(pairwise(_edges(last, legs))) for _ in range(a, b)]


@lru_cache(maxsize=64)
def visits(ends: tuple[int, ...], way: Way) -> tuple[Visit, ...]:
    """Return the visits of a route through a pipeline whose workers' parts of :func:`in_turn` end at ``ends``."""
    place_of = [0] * ends[-1]
    order = in_turn(ends[-1], way)
    for place, (a, b) in enumerate(pairwise((0, *ends))):
        for layer in order[a:b]:
            place_of[layer] = place
    found, first = list[Visit](), 0
    for place, run in groupby(place_of):
        last = first + len(list(run))
        found.append((place, first, last))
        first = last
    return tuple(found)


def hops(workers: Sequence[int]) -> tuple[Hop, ...]:
    """Return the hops of a microbatch whose layers, in order, are on ``workers``."""
    found, first = list[Hop](), 0
    for worker, layers in groupby(workers):
        last = first + len([*layers])
        found.append(Hop(worker=worker, first=first, last=last))
        first = last
    return tuple(found)


def route(workers: Sequence[int], ends: tuple[int, ...], way: Way, microbatches: tuple[int, ...]) -> Route:
    """Return the same as a route over ``workers``."""
    visited = (Hop(worker=workers[place], first=a, last=b) for place, a, b in visits(ends, way))
    return Route(microbatches=microbatches, hops=tuple(visited))


def spans(ends: tuple[int, ...], way: Way) -> list[list[tuple[int, int]]]:
    """Return, for each worker of a pipeline, the layers of its visits."""
    found: list[list[tuple[int, int]]] = [[] for _ in ends]
    for place, a, b in visits(ends, way):
        found[place].append((a, b))
    return found


def window(stage: int, stages: int, last: int, way: Way) -> tuple[int, int]:
    """Return the range in which the part of ``stage`` may end. Embedding and head come with a transformer layer."""
    if stage == stages - 1:
        return last, last
    first, behind = (way.legs + 2, 0) if way.turns else (way.legs + 1, way.legs)
    return stage + first, last - (stages - 1 - stage) - behind
