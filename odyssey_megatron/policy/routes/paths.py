"""From a path for each microbatch to routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from odyssey_megatron.plan.layout import Hop, Route


def group_routes(paths: Mapping[int, tuple[Hop, ...]]) -> tuple[Route, ...]:
    """Return routes from microbatch -> path: equal paths share a route; ascending by first microbatch."""
    members: dict[tuple[Hop, ...], list[int]] = {}
    known: dict[int, list[int]] = {}  # hashing a path is slow, and most microbatches share the path object
    for microbatch in sorted(paths):
        path = paths[microbatch]
        if id(path) not in known:
            known[id(path)] = members.setdefault(path, [])
        known[id(path)].append(microbatch)
    return tuple(Route(microbatches=tuple(ids), hops=hops) for hops, ids in members.items())


def merge_hops(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """Return the same path with consecutive visits to one worker merged."""
    merged: list[Hop] = []
    for hop in hops:
        if merged and merged[-1].worker == hop.worker:
            hop = Hop(worker=hop.worker, first=merged.pop().first, last=hop.last)
        merged.append(hop)
    return tuple(merged)
