"""The layers of each worker of a pipeline, if a microbatch goes through its workers once or more often.

The way has legs: down the workers, up again, and so on. One leg is the usual pipeline, two are a V, four a W; all legs
have equally many layers. Workers get consecutive parts of one sequence, in which the legs take turns: the first layer
of the way down, the last of the way up, the second of the way down, and so on. So each worker has neighbouring layers
of each leg. Where a leg ends the worker has the layers of two legs in one visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise

from odyssey_megatron.plan.layout import Hop, Route

LEGS = {2: " in a V", 4: " in a W"}
"""Numbers of legs other than one, and how they are described in tables."""

Visit = tuple[int, int, int]
"""(place of the worker in its pipeline, first layer, last)."""


@lru_cache(maxsize=64)
def turns(last: int, legs: int) -> tuple[int, ...]:
    """Return the layers before ``last`` in the order in which a pipeline with ``legs`` is cut.

    The outermost legs come first, so that the first worker gets embedding and head with a transformer layer each.
    """
    ways = [
        range(a, b) if i % 2 == 0 else range(b - 1, a - 1, -1)
        for i, (a, b) in enumerate(pairwise(_edges(last, legs)))
    ]
    ways.insert(1, ways.pop())
    longest = max(map(len, ways))
    return tuple(way[depth] for depth in range(longest) for way in ways if depth < len(way))


def _edges(last: int, legs: int) -> list[int]:
    return [last * leg // legs for leg in range(legs + 1)]


def legs_of(last: int, legs: int) -> list[int]:
    """Return the leg of each layer before ``last``."""
    return [leg for leg, (a, b) in enumerate(pairwise(_edges(last, legs))) for _ in range(a, b)]


@lru_cache(maxsize=64)
def visits(ends: tuple[int, ...], legs: int) -> tuple[Visit, ...]:
    """Return the visits of a route through a pipeline whose workers' parts of :func:`turns` end at ``ends``."""
    place_of = [0] * ends[-1]
    order = turns(ends[-1], legs)
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


def route(workers: Sequence[int], ends: tuple[int, ...], legs: int, microbatches: tuple[int, ...]) -> Route:
    """Return the same as a route over ``workers``."""
    visited = (Hop(worker=workers[place], first=a, last=b) for place, a, b in visits(ends, legs))
    return Route(microbatches=microbatches, hops=tuple(visited))


def spans(ends: tuple[int, ...], legs: int) -> list[list[tuple[int, int]]]:
    """Return, for each worker of a pipeline, the layers of its visits."""
    found: list[list[tuple[int, int]]] = [[] for _ in ends]
    for place, a, b in visits(ends, legs):
        found[place].append((a, b))
    return found


def window(stage: int, stages: int, last: int, legs: int) -> tuple[int, int]:
    """Return the range in which the part of ``stage`` may end. Embedding and head come with a transformer layer."""
    if stage == stages - 1:
        return last, last
    first, behind = (2, 1) if legs == 1 else (legs + 2, 0)
    return stage + first, last - (stages - 1 - stage) - behind
