"""Placing the replicas of a layer on different nodes, so that the loss of a whole node leaves a holder of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import product

from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.redundancy import with_keepers


def on_one_node(layout: Layout, nodes: Mapping[int, int]) -> dict[int, list[int]]:
    """Return, for each node, the layers of whose state some is on that node only: losing the node would end the job.

    Empty if there is only one node. ``nodes``: the node of each worker.
    """
    found: dict[int, list[int]] = {}
    if len({nodes[worker] for worker in layout.workers}) > 1:
        for layer, owners in enumerate(layout.owners):
            for node in nodes_alone(owners, nodes):
                found.setdefault(node, []).append(layer)
    return dict(sorted(found.items()))


def nodes_alone(owners: Iterable[tuple[int, ...]], nodes: Mapping[int, int]) -> set[int]:
    """Return the nodes that have all of some slice's ``owners``; ``nodes``: the node of each worker."""
    of_slices = [{nodes[worker] for worker in one} for one in owners]
    return {min(on) for on in of_slices if len(on) == 1}


def spread(
    layout: Layout, nodes: Mapping[int, int], optimizer_copies: int = 0, *, widely: bool = False
) -> Layout:
    """Return ``layout`` with its workers in each other's places, so that fewer layers would be lost with one node.

    A layer would be lost if all its holders are on the node; or, with ``optimizer_copies``, if all owners of a slice of
    its optimizer state are. With ``widely`` it is also worth it if as many would be lost, but layers are on more nodes,
    those first that are on fewest. Returns ``layout`` itself if nothing is won.

    Workers are alike, so nothing else changes. The places that compute the same layers are dealt to the nodes in turn:
    they are on as many different nodes as there are nodes, or holders.
    """
    found = _dealt(layout, nodes)

    def safety(one: Layout) -> tuple[int, list[int]]:
        kept = with_keepers(one, None, nodes, optimizer_copies)
        alone = sum(map(len, on_one_node(kept, nodes).values()))
        fewest = (min(len({nodes[worker] for worker in each}) for each in owners) for owners in kept.owners)
        return -alone, sorted(fewest) if widely else []

    return found if safety(found) > safety(layout) else layout


def _dealt(layout: Layout, nodes: Mapping[int, int]) -> Layout:
    """Return ``layout`` with its places, in the order of their layers, dealt to the nodes in turn."""
    first: dict[int, tuple[int, int]] = {}
    for number, route in enumerate(layout.routes):
        for hop in route.hops:
            first.setdefault(hop.worker, (hop.first, number))
    before: Counter[int] = Counter()
    turn = {}
    for worker in sorted(layout.workers, key=lambda worker: (nodes[worker], worker)):
        turn[worker] = (before[nodes[worker]], nodes[worker])
        before[nodes[worker]] += 1
    standing = sorted(layout.workers, key=lambda worker: (first.get(worker, (layout.num_layers, 0)), worker))
    places = dict(zip(standing, sorted(layout.workers, key=turn.__getitem__), strict=True))
    return with_places(layout, places)


def apart(
    layout: Layout,
    previous: Layout,
    nodes: Mapping[int, int],
    optimizer_copies: int = 0,
    sort: Callable[[int], Hashable] = lambda worker: None,
) -> Layout:
    """Return ``layout`` with pairs of workers in each other's places, so that fewer layers would be lost with one node.

    In contrast to :func:`spread`, state has to move for it: as few pairs as help change places, and of pairs that help
    alike the one that lacks fewer layers. Where that leads nowhere, workers are dealt out as :func:`spread` does first.
    Returns ``layout`` itself if nothing is won.

    Args:
        previous: the layout whose holders have the state.
        nodes: the node of each worker.
        optimizer_copies: number of keepers of each slice of optimizer state; 0: all holders.
        sort: only workers of one sort change places.
    """
    found = _Exchanges(layout, previous, nodes, optimizer_copies, sort)
    before = found.exceeding
    if not before:
        return layout
    found.improve()
    if found.exceeding and len({sort(worker) for worker in layout.workers}) == 1:
        dealt = _Exchanges(_dealt(layout, nodes), previous, nodes, optimizer_copies, sort)
        dealt.improve()
        found = min(found, dealt, key=lambda one: one.exceeding)
    return with_places(found.layout, found.place) if found.exceeding < before else layout


class _Exchanges:
    """Pairs of workers that change places, one after the other."""

    def __init__(
        self,
        layout: Layout,
        previous: Layout,
        nodes: Mapping[int, int],
        copies: int,
        sort: Callable[[int], Hashable],
    ):
        self.layout, self._nodes, self._copies, self._sort = layout, nodes, copies, sort
        self._held, self._had = _held(layout), _held(previous)
        self.place = {worker: worker for worker in self._held}
        """Place, named by the worker that ``layout`` has there -> worker."""
        self._on = [Counter(nodes[worker] for worker in holders) for holders in layout.all_holders]

    @property
    def exceeding(self) -> int:
        """0 if no layer would be lost with a node. Fewer such layers come first, then fewer holders too many."""
        return sum(map(self._exceeds, range(len(self._on))))

    def _exceeds(self, layer: int) -> int:
        found = _exceeds(self._on[layer], self._copies)
        return found + len(self._on) * len(self.place) if found else 0

    def improve(self) -> None:
        """Exchange pairs as long as that helps."""
        for _ in range(len(self.place)):
            pairs = (self._best(layer) for layer in range(len(self._on)) if self._exceeds(layer))
            pair = next(filter(None, pairs), None)
            if pair is None:
                return
            self._exchange(*pair)

    def _best(self, layer: int) -> tuple[int, int] | None:
        """Return the two places whose exchange helps most, of which one has ``layer`` on the node that has too much."""
        ((full, _),) = self._on[layer].most_common(1)
        inside, outside = list[int](), list[int]()
        for at in self._distinct():
            if (layer in self._held[at]) == (self._nodes[self.place[at]] == full):
                (inside if layer in self._held[at] else outside).append(at)
        pairs = [
            (one, other)
            for one, other in product(inside, outside)
            if self._sort(self.place[one]) == self._sort(self.place[other])
        ]
        gain, _, *pair = max((self._tried(*pair) for pair in pairs), default=(0, 0, 0, 0))
        return (pair[0], pair[1]) if gain > 0 else None

    def _distinct(self) -> Iterable[int]:
        """Return the places, of those that are alike in all that counts only one."""
        found: dict[Hashable, int] = {}
        for at, worker in self.place.items():
            kind = self._held[at], self._had.get(worker), self._nodes[worker], self._sort(worker)
            found.setdefault(kind, at)
        return found.values()

    def _tried(self, one: int, other: int) -> tuple[int, int, int, int]:
        """Return (by how much less layers exceed after it, minus the layers lacked then, ``one``, ``other``)."""
        gain = self._exchange(one, other)
        lacked = sum(len(self._held[at] - self._had.get(self.place[at], frozenset())) for at in (one, other))
        self._exchange(one, other)
        return gain, -lacked, one, other

    def _exchange(self, one: int, other: int) -> int:
        changed = self._held[one] ^ self._held[other]
        before = sum(map(self._exceeds, changed))
        here, there = self._nodes[self.place[one]], self._nodes[self.place[other]]
        for layer in changed:
            more = 1 if layer in self._held[other] else -1
            self._on[layer].update({here: more, there: -more})
        self.place[one], self.place[other] = self.place[other], self.place[one]
        return before - sum(map(self._exceeds, changed))


def _held(layout: Layout) -> dict[int, frozenset[int]]:
    found: dict[int, set[int]] = {worker: set() for worker in layout.workers}
    for layer, holders in enumerate(layout.all_holders):
        for worker in holders:
            found[worker].add(layer)
    return {worker: frozenset(layers) for worker, layers in found.items()}


def _exceeds(on: Mapping[int, int], copies: int) -> int:
    """Return how many holders of a layer too many are on one node; ``on``: the number on each node.

    The loss of the node must leave a keeper of each slice. A slice has ``copies`` neighbours on a ring as keepers: one
    of any so many is elsewhere if the holders elsewhere part those of the node into runs of ``copies`` - 1 at most.
    """
    most, number = max(on.values()), sum(on.values())
    if number < 2:
        return 0  # it is lost with its node wherever that is
    elsewhere = number - most
    return max(0, most - (copies - 1) * elsewhere) if 0 < copies < number else most * (elsewhere == 0)


def with_places(layout: Layout, places: Mapping[int, int]) -> Layout:
    """Return ``layout`` with worker ``places[w]`` in the place of each worker w."""

    def moved(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(places[worker] for worker in row)) for row in rows)

    routes = tuple(
        replace(route, hops=tuple(replace(hop, worker=places[hop.worker]) for hop in route.hops))
        for route in layout.routes
    )
    keepers = tuple(tuple(places.get(worker, worker) for worker in ring) for ring in layout.keepers)
    return replace(layout, holders=moved(layout.holders), routes=routes, keepers=keepers).check()
