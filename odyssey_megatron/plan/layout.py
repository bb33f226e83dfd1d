"""Layouts: which workers hold which layers, and which route each microbatch takes.

Layers are numbered as the planner does: 0 is the embedding, 1..n are the transformer layers, n+1 is the head. Spans are
half open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from odyssey_megatron.errors import LayoutInvalid
from odyssey_megatron.names import lengths_text
from odyssey_megatron.plan.placing.slices import (
    EVERYTHING,
    NOBODY,
    Slice,
    Span,
    firsts,
    kept,
    owners_of,
    slices,
    without,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One visit of a microbatch: ``worker`` computes layers ``[first, last)``."""

    worker: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The path of some microbatches (ids within the step, ascending) through all layers."""

    microbatches: tuple[int, ...]
    hops: tuple[Hop, ...]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first, last) of each hop: equal for routes that are cut alike, whatever workers they go through."""
        return tuple((hop.first, hop.last) for hop in self.hops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive layers ``[first, last)`` with one holder set: a model chunk with its own group."""

    first: int
    last: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Holders plus routes. Every holder of a layer takes part in its gradient reduction, every step."""

    holders: tuple[tuple[int, ...], ...]
    """``holders[layer]``: worker ids, ascending."""
    routes: tuple[Route, ...]
    keepers: tuple[tuple[int, ...], ...] = ()
    """``keepers[layer]``: the ring of workers over which its optimizer state is cut (``plan/placing/slices.py``). The
    keepers of a slice make its step; the other holders get its new weights from its first keeper. Empty: every holder
    keeps all state."""
    copies: int = 0
    """Number of keepers of each slice, where there are ``keepers``."""
    cuts: tuple[int, ...] = ()
    """Layers at which blocks must end besides, so that what was two model chunks can go on in an interrupted step."""
    step_microbatches: int = 0
    """Number of microbatches in a step, if ``routes`` are only those through one worker (``plan/sending/wire.py``); 0:
    they are all routes."""
    tied: bool = False
    """Whether embedding and head share a weight. It counts as one more layer, behind the head, which no route goes
    through. Every holder of embedding or head holds it, and all of them sum its gradient."""

    @property
    def num_layers(self) -> int:
        """Number of layers that routes go through."""
        return len(self.holders)

    @property
    def all_holders(self) -> tuple[tuple[int, ...], ...]:
        """``holders``, followed by those of the tied weight if there is one."""
        if not self.tied:
            return self.holders
        return (*self.holders, tuple(sorted({*self.holders[0], *self.holders[-1]})))

    @property
    def states(self) -> tuple[tuple[Slice, ...], ...]:
        """The slices of each layer's state. A slice is lost if all its owners are."""
        if self.keepers:
            return tuple(slices(ring, self.copies) for ring in self.keepers)
        return tuple((Slice(EVERYTHING, holders),) for holders in self.all_holders)

    @property
    def owners(self) -> tuple[frozenset[tuple[int, ...]], ...]:
        """For each layer, the owners of each slice of its state, of whom one must live."""
        return tuple(map(owners_of, self.states))

    def speaker(self, layer: int) -> int:
        """Return the worker that saves ``layer``.

        It is the first holder; or, if state is cut, the first owner of a slice, which is another one for each layer.
        """
        found = self.states[layer]
        return found[layer % len(found)].owners[0]

    def alone(self) -> dict[int, list[int]]:
        """Return, for each worker that alone has some state, the layers of which it has."""
        found: dict[int, list[int]] = {}
        for layer, owners in enumerate(self.owners):
            for worker in sorted({one[0] for one in owners if len(one) == 1}):
                found.setdefault(worker, []).append(layer)
        return found

    @property
    def losses_survived(self) -> int:
        """Number of workers that may be lost at once, whichever they are, without losing state."""
        return min(len(one) for owners in self.owners for one in owners) - 1

    @property
    def revisits(self) -> bool:
        """Whether some route visits a worker more than once."""
        return any(len({hop.worker for hop in route.hops}) < len(route.hops) for route in self.routes)

    @property
    def lengths(self) -> str:
        """The number of workers in each pipeline as text; see :func:`odyssey_megatron.names.lengths_text`."""
        found = [(len({hop.worker for hop in route.hops}), 1) for route in self.routes]
        return lengths_text(found) + (", workers visited more than once" if self.revisits else "")

    def with_tied(self, layers: Iterable[int]) -> set[int]:
        """Return ``layers``, and the tied weight if embedding or head is among them."""
        own = set(layers)
        return own | {self.num_layers} if self.tied and own & {0, self.num_layers - 1} else own

    @property
    def num_microbatches(self) -> int:
        return self.step_microbatches or sum(len(route.microbatches) for route in self.routes)

    @property
    def workers(self) -> tuple[int, ...]:
        """Every worker that holds anything, ascending."""
        return tuple(sorted(set[int]().union(*self.holders)))

    def blocks(self) -> tuple[Block, ...]:
        """Return the layers in as few blocks as possible.

        All layers of a block have the same holders, no hop begins or ends inside a block, and blocks end at ``cuts``.
        """
        cuts = {0, self.num_layers, *self.cuts}
        cuts |= {i for i in range(1, self.num_layers) if self.holders[i] != self.holders[i - 1]}
        cuts |= {end for route in self.routes for hop in route.hops for end in (hop.first, hop.last)}
        edges = [*sorted(cuts), self.num_layers + 1] if self.tied else sorted(cuts)
        holders = self.all_holders
        return tuple(Block(first=a, last=b, holders=holders[a]) for a, b in pairwise(edges))

    def held_by(self, worker: int) -> tuple[int, ...]:
        """Return the layers that ``worker`` holds, ascending."""
        return tuple(i for i, holders in enumerate(self.all_holders) if worker in holders)

    def kept_by(self, worker: int) -> tuple[int, ...]:
        """Return the layers of whose optimizer state ``worker`` keeps some, ascending."""
        return tuple(i for i, found in enumerate(self.states) if worker in kept(found))

    def spans_kept_by(self, worker: int) -> dict[int, tuple[Span, ...]]:
        """Return, for each layer, the spans of its optimizer state that ``worker`` keeps."""
        found = {layer: kept(of_layer).get(worker, ()) for layer, of_layer in enumerate(self.states)}
        return {layer: spans for layer, spans in found.items() if spans}

    def spare_states(self, worker: int) -> dict[int, tuple[Span, ...]]:
        """Return, for each layer, the spans of its optimizer state that ``worker`` has for a failure only.

        These are the slices whose weights another keeper sends; or, if every holder keeps all state, the layers that
        it holds as a shadow.
        """
        computed = self.with_tied(
            layer
            for route in self.routes
            for hop in route.hops
            if hop.worker == worker
            for layer in range(hop.first, hop.last)
        )
        spare: dict[int, tuple[Span, ...]] = {}
        for layer, found in enumerate(self.states):
            own = kept(found).get(worker, ())
            if self.keepers:
                spare[layer] = tuple(without(own, firsts(found).get(worker, ())))
            elif layer not in computed:
                spare[layer] = own
        return {layer: spans for layer, spans in spare.items() if spans}

    def check(self) -> Layout:
        """Return self if every microbatch 0..M-1 has exactly one route, through every layer once, in order,
        and only through holders.

        Raises:
            LayoutInvalid: this is not so, or some state has no keeper.
        """
        for layer, holders in enumerate(self.all_holders):
            if not holders or list(holders) != sorted(set(holders)):
                raise LayoutInvalid(f"layer {layer}: holders {holders} must be non-empty, ascending")
        if len(self.keepers) > len(self.all_holders) or any(
            not 0 <= cut <= self.num_layers for cut in self.cuts
        ):
            raise LayoutInvalid(
                f"{len(self.keepers)} rings of keepers and cuts {self.cuts} do not go with {self.num_layers} layers"
            )
        for layer, ring in enumerate(self.keepers):
            holders, there = self.all_holders[layer], [worker for worker in ring if worker != NOBODY]
            if not set(there) <= set(holders) or len(set(there)) < len(there):
                raise LayoutInvalid(f"layer {layer}: keepers {ring} must be some of {holders}, each once")
            if not all(one.owners for one in slices(ring, self.copies)):
                raise LayoutInvalid(f"layer {layer}: some of its state has no keeper in {ring}")
        seen = sorted(m for route in self.routes for m in route.microbatches)
        if seen != list(range(len(seen))):
            raise LayoutInvalid(f"microbatches {seen} are not 0..{len(seen) - 1}, each once")
        holders_of = [frozenset(holders) for holders in self.holders]
        sound = set[tuple[int, int, int]]()
        for route in self.routes:
            self._check_route(route, holders_of, sound)
        return self

    def _check_route(
        self, route: Route, holders_of: list[frozenset[int]], sound: set[tuple[int, int, int]]
    ) -> None:
        """Raise LayoutInvalid if ``route`` is wrong.

        ``sound`` collects (worker, first, last) of hops whose worker is known to hold these layers.
        """
        at = 0
        for hop in route.hops:
            if hop.first != at or hop.last <= hop.first:
                raise LayoutInvalid(f"{hop} does not go on from layer {at} in {route}")
            at = hop.last
            if (hop.worker, hop.first, at) in sound:
                continue
            held = [hop.worker in holders for holders in holders_of[hop.first : at]]
            if not all(held) or len(held) < at - hop.first:
                layer = hop.first + (held.index(False) if False in held else len(held))
                raise LayoutInvalid(f"worker {hop.worker} does not hold layer {layer} ({hop})")
            sound.add((hop.worker, hop.first, at))
        if at != self.num_layers:
            raise LayoutInvalid(f"{route} ends at layer {at} of {self.num_layers}")


def layout_from_routes(num_layers: int, routes: tuple[Route, ...], *, tied: bool = False) -> Layout:
    """Return the layout in which exactly the workers that compute a layer hold it."""
    holders: list[set[int]] = [set() for _ in range(num_layers)]
    for route in routes:
        for hop in route.hops:
            for layer in range(hop.first, hop.last):
                holders[layer].add(hop.worker)
    return Layout(holders=tuple(tuple(sorted(h)) for h in holders), routes=routes, tied=tied).check()


def pipeline_route(workers: tuple[int, ...], ends: tuple[int, ...], microbatches: tuple[int, ...]) -> Route:
    """Return a pipeline through ``workers``; stage i computes ``[ends[i-1], ends[i])``, the first from layer 0."""
    spans = pairwise((0, *ends))
    hops = tuple(Hop(worker=worker, first=a, last=b) for worker, (a, b) in zip(workers, spans, strict=True))
    return Route(microbatches=microbatches, hops=hops)


def megatron_layout(
    *,
    num_layers: int,
    pipeline_size: int,
    num_workers: int,
    num_microbatches: int,
    stage_layers: Sequence[int] = (),
    tied: bool = False,
) -> Layout:
    """Return the failure-free layout as Megatron places it: worker = stage * dp + replica.

    Transformer layers are split as ``stage_layers`` says, else evenly: what is left over goes to the middle stages,
    away from embedding and head. Microbatches go round-robin over replicas. Source: megatron core_v0.16.1
    parallel_state.py, default order ``tp-cp-ep-dp-pp``.
    """
    dp, blocks = num_workers // pipeline_size, num_layers - 2
    share, extra = divmod(blocks, pipeline_size)
    # Middle stages first: the first also runs the embedding and the last the head.
    by_room = sorted(range(pipeline_size), key=lambda s: (s == pipeline_size - 1, s == 0, s))
    counts = list(stage_layers) or [share + (stage in by_room[:extra]) for stage in range(pipeline_size)]
    counts[0] += 1
    counts[-1] += 1
    ends = tuple(sum(counts[: stage + 1]) for stage in range(pipeline_size))
    routes = tuple(
        pipeline_route(
            tuple(stage * dp + replica for stage in range(pipeline_size)),
            ends,
            tuple(range(replica, num_microbatches, dp)),
        )
        for replica in range(dp)
    )
    return layout_from_routes(num_layers, routes, tied=tied)
