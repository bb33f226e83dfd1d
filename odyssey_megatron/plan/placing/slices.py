"""How a layer's optimizer state is cut over its holders: flat slices, each with as many owners as there are copies.

The holders of a layer stand in the *places* of a ring. The state is cut into as many slices of equal size as there are
places. Slice i is kept by the workers in places i, i + 1, ... (``copies`` of them, going around the ring). So each
worker has ``copies`` consecutive slices, which are ``copies`` / places of the state. The first living owner of a slice
*sums* its gradient and sends its weights; the other owners' copies are spare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

WHOLE = 720_720
"""The number of shares into which a layer's state is divided, whatever its size. Slices begin and end between shares.
All numbers of places up to 16 divide it.
"""

NOBODY = -1
"""Stands in the place of a lost worker, so that the slices of the others stay where they are."""

Span = tuple[int, int]
"""Shares ``[first, last)`` of a layer."""

EVERYTHING: Span = (0, WHOLE)


class Slice(NamedTuple):
    """A slice of a layer's state."""

    span: Span
    owners: tuple[int, ...]
    """The workers that keep it (its keepers); the first one sends its weights."""


@lru_cache(maxsize=4096)
def slices(ring: tuple[int, ...], copies: int) -> tuple[Slice, ...]:
    """Return the slices of a layer with the places ``ring``, in order.

    There is a single slice if the ring has no more places than ``copies``: then all its workers keep all state.
    """
    count = len(ring)
    if count <= copies:
        return (Slice(EVERYTHING, tuple(worker for worker in ring if worker != NOBODY)),)
    edges = [WHOLE * place // count for place in range(count + 1)]
    return tuple(
        Slice(
            (edges[place], edges[place + 1]),
            tuple(worker for behind in range(copies) if (worker := ring[(place + behind) % count]) != NOBODY),
        )
        for place in range(count)
    )


@lru_cache(maxsize=4096)
def owners_of(found: tuple[Slice, ...]) -> frozenset[tuple[int, ...]]:
    """Return the owners of each slice; equal ones only once."""
    return frozenset(one.owners for one in found)


@lru_cache(maxsize=4096)
def kept(found: tuple[Slice, ...]) -> Mapping[int, tuple[Span, ...]]:
    """Return, for each worker, the slices that it keeps."""
    return _spans_of((owner, one.span) for one in found for owner in one.owners)


@lru_cache(maxsize=4096)
def kept_shares(found: tuple[Slice, ...]) -> Mapping[int, int]:
    """Return, for each worker, the number of shares in the slices that it keeps."""
    return MappingProxyType({worker: size(spans) for worker, spans in kept(found).items()})


@lru_cache(maxsize=4096)
def firsts(found: tuple[Slice, ...]) -> Mapping[int, tuple[Span, ...]]:
    """Return, for each worker, the slices of which it is the first owner."""
    return _spans_of((one.owners[0], one.span) for one in found if one.owners)


def _spans_of(pairs: Iterable[tuple[int, Span]]) -> Mapping[int, tuple[Span, ...]]:
    spans: dict[int, list[Span]] = {}
    for owner, span in pairs:
        spans.setdefault(owner, []).append(span)
    return MappingProxyType({owner: tuple(own) for owner, own in spans.items()})


def size(spans: Iterable[Span]) -> int:
    """Return the number of shares in ``spans``."""
    return sum(last - first for first, last in spans)


def bytes_of(span: Span, state_bytes: int) -> int:
    """Return the bytes of ``span``, rounded up, of a layer's state of ``state_bytes`` bytes."""
    return -(-state_bytes * (span[1] - span[0]) // WHOLE)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return ``spans``, which ascend, with adjacent ones put together."""
    found: list[Span] = []
    for one in spans:
        if found and found[-1][1] == one[0]:
            found[-1] = (found[-1][0], one[1])
        else:
            found.append(one)
    return found


def within(span: Span, others: Iterable[Span]) -> Iterator[Span]:
    """Yield the parts of ``span`` that are in ``others``."""
    for one in others:
        low, high = max(span[0], one[0]), min(span[1], one[1])
        if low < high:
            yield low, high


def without(spans: Iterable[Span], others: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of ``spans`` that are not in ``others``, which ascend."""
    for low, high in spans:
        for start, stop in others:
            if stop <= low or high <= start:
                continue
            if low < start:
                yield low, start
            low = max(low, stop)
        if low < high:
            yield low, high


def elements(span: Span, numel: int) -> tuple[int, int]:
    """Return the range of ``numel`` flat elements that ``span`` covers; of a few elements it may be empty."""
    return numel * span[0] // WHOLE, numel * span[1] // WHOLE


# -- who has which place -----------------------------------------------------------------------------------------------


def ring_of(
    holders: Sequence[int],
    before: Sequence[int],
    nodes: Mapping[int, int],
    copies: int,
    *,
    joins: bool = True,
) -> tuple[int, ...]:
    """Return the places of a layer with these ``holders``.

    Workers that had a place ``before`` keep their order, and so most of what they have. New workers take the places of
    lost ones if there are as many of both, and else come last. Workers are dealt from node to node if nobody had a
    place before, or if that leaves fewer pairs of keepers of one slice on one node.

    Args:
        nodes: the node of each living worker.
        joins: whether each holder is to have a place. If not, nothing moves as long as each slice has an owner left:
            the places of lost workers stay empty.
    """
    there = set(holders)
    places = [worker if worker in there else NOBODY for worker in before]
    if places and not joins and all(one.owners for one in slices(tuple(places), copies)):
        return tuple(places)
    had = set(places)
    new = [worker for worker in holders if worker not in had]
    if places.count(NOBODY) == len(new):
        free = [place for place, taken in enumerate(places) if taken == NOBODY]
        for worker in new:
            best = _best_place(free, places, nodes[worker], nodes, copies)
            free.remove(best)
            places[best] = worker
    else:
        places = [worker for worker in places if worker != NOBODY] + new
    found = tuple(places)
    if before and not (clashes := _clashes(found, nodes, copies)):
        return found
    dealt = _dealt(holders, nodes, copies)
    return found if before and clashes <= _clashes(dealt, nodes, copies) else dealt


def _dealt(holders: Sequence[int], nodes: Mapping[int, int], copies: int) -> tuple[int, ...]:
    """Deal the holders around the ring node by node, the largest first, so that neighbours are on different nodes."""
    on: dict[int, list[int]] = {}
    for worker in holders:
        on.setdefault(nodes[worker], []).append(worker)
    grouped = [worker for node in sorted(on, key=lambda node: (-len(on[node]), node)) for worker in on[node]]
    if len(on) == 1:
        return tuple(grouped)
    order = [place for turn in range(copies) for place in range(turn, len(grouped), copies)]
    return tuple(worker for _, worker in sorted(zip(order, grouped, strict=True)))


def _best_place(
    free: Sequence[int], places: Sequence[int], node: int, nodes: Mapping[int, int], copies: int
) -> int:
    """The first of the ``free`` places with the fewest neighbours on ``node``. The search ends at one that has none: a
    thousand new holders of a layer would look at half a million places otherwise.
    """
    best, fewest = free[0], len(places)
    for at in free:
        found = _neighbours(places, at, node, nodes, copies)
        if found < fewest:
            best, fewest = at, found
        if not fewest:
            break
    return best


def _neighbours(places: Sequence[int], at: int, node: int, nodes: Mapping[int, int], copies: int) -> int:
    """Return how many workers on ``node`` would keep a slice together with the one in place ``at``."""
    apart = {(at + step) % len(places) for step in range(1 - copies, copies)} - {at}
    return sum(places[one] != NOBODY and nodes[places[one]] == node for one in apart)


def _clashes(ring: Sequence[int], nodes: Mapping[int, int], copies: int) -> int:
    """Return how many pairs of workers that keep a slice together are on one node."""
    on = [nodes[worker] if worker != NOBODY else NOBODY - at for at, worker in enumerate(ring)]
    return sum(a == b for step in range(1, copies) for a, b in zip(on, on[step:] + on[:step], strict=True))
