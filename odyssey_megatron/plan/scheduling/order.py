"""From routes to the compute order of every worker, one group of routes that share workers after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.checking.simulate import sum_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout, Route
from odyssey_megatron.plan.placing.memory import activation_caps, minimum_bytes
from odyssey_megatron.plan.schedule import Instr, Program, Schedule
from odyssey_megatron.plan.scheduling.known import known
from odyssey_megatron.plan.scheduling.list_schedule import Solved, best_order
from odyssey_megatron.plan.scheduling.polish import polished
from odyssey_megatron.plan.scheduling.reductions import NO_TAIL, Tail, buckets
from odyssey_megatron.plan.scheduling.tasks import TICKS_PER_S, Shape
from odyssey_megatron.plan.scheduling.visits import OPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of routes that share no worker with others, with the order found for its shape."""

    workers: tuple[int, ...]
    microbatches: tuple[int, ...]
    solved: Solved
    """The order of its shape, in which workers and microbatches are indices into the two tuples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What each worker computes and in which order. Equal groups share one ``Solved``."""

    groups: tuple[Group, ...]
    done_s: dict[int, float]
    """Worker -> when its last weight gradient ends; ascending by worker, and including workers without a route."""

    def tails(self) -> dict[int, Tail]:
        """Return, for each worker, the weight gradients that it ends with; one object for workers in equal places."""
        found = dict.fromkeys(self.done_s, NO_TAIL)
        of_kind: dict[int, tuple[Tail, ...]] = {}
        for group in self.groups:
            if id(group.solved) not in of_kind:
                of_kind[id(group.solved)] = group.solved.tails()
            found.update(zip(group.workers, of_kind[id(group.solved)], strict=True))
        return found

    def schedule(self) -> Schedule:
        """Return the schedule of compute instructions, without messages and sums."""
        programs: dict[int, Program] = dict.fromkeys(self.done_s, ())
        for group in self.groups:
            visits = [(group.microbatches[m], first, last) for m, first, last in group.solved.shape.visits()]
            for worker, queue in zip(group.workers, group.solved.queues, strict=True):
                programs[worker] = tuple(Instr(OPS[code & 7], *visits[code >> 3]) for code in queue)
        return Schedule(programs=tuple(programs.items()))


def order_routes(
    layout: Layout,
    costs: Costs,
    *,
    in_flight_cap: Mapping[int, int] | None = None,
    speeds: Mapping[int, float] | None = None,
    before_s: Mapping[int, float] | None = None,
    thorough: bool = False,
    tries: int | None = None,
) -> Order:
    """Find the order of each group of routes; equal groups are scheduled only once.

    Args:
        in_flight_cap: worker -> bytes of activations that it may keep; None: what 1F1B keeps at its place.
        speeds: worker -> relative speed; 1.0 if missing.
        before_s: worker -> when it must be done at the latest; None: no limit.
        thorough: there is time, so find orders for later look-ups even where this call could give up early.
        tries: number of attempts to improve an order (``plan/scheduling/polish.py``), also for later look-ups. None: no
            attempts; 0: the order only serves to compare layouts, and nothing is kept.

    Raises:
        LayoutInvalid: two hops in a row on one worker (they must be one hop).
        PlanInfeasible: a cap is below what any order needs; or a worker is not done in time.
    """
    caps = activation_caps(layout, costs) if in_flight_cap is None else in_flight_cap
    done_s = dict.fromkeys(layout.workers, 0.0)
    here: dict[Shape, Solved] = {}
    groups = []
    together = independent(layout.routes)
    sums_s = _sums_s(layout, costs) if any(len(routes) > 1 for routes in together) else {}
    for routes in together:
        # In order of appearance, so that equal pipelines look equal whichever workers they have.
        routes.sort(key=lambda route: _looks(route, caps, speeds or {}))
        workers = tuple(dict.fromkeys(hop.worker for route in routes for hop in route.hops))
        microbatches = _by_turn(routes)
        shape = _shape(routes, workers, microbatches, caps, speeds or {}, costs)
        if len(routes) > 1 and any(own := tuple(sums_s[worker] for worker in workers)):
            shape = replace(shape, sums_s=own)
        if shape not in here:
            try:
                ends_s = [before_s[worker] for worker in workers] if before_s else None
                if tries == 0:
                    solved = best_order(shape, costs, ends_s)
                else:
                    solved = solve(shape, costs, ends_s, thorough, tries or 0)
            except PlanInfeasible:
                _check_caps(layout, costs, caps)  # says which worker
                raise
            if solved is None:
                raise PlanInfeasible("given up while it was scheduled: not done in time to be better")
            here[shape] = solved
        solved = here[shape]
        groups.append(Group(workers=workers, microbatches=microbatches, solved=solved))
        done_s.update(zip(workers, solved.done_s, strict=True))
    return Order(groups=tuple(groups), done_s=done_s)


def solve(
    shape: Shape, costs: Costs, before_s: list[float] | None, thorough: bool, tries: int = 0
) -> Solved | None:
    """Return :func:`best_order`, looked up if it is known.

    If the best order without a limit is within ``before_s``, it is also what ``best_order`` finds with that limit.
    There are few exceptions: where workers have limits of their own, which rules are tried by finer times depends on
    what is in time, and with a limit there are fewer patient rules.
    """
    orders = known(costs.of_orders).orders  # slow links that matter are in the shape
    best = orders.get(shape)
    if best is None and (thorough or before_s is None):
        best = best_order(shape, costs)
        assert best is not None, "without a limit there is an order"
        orders.put(shape, best, size_bytes(best))
    if best is not None and tries:
        best = polished(best, costs, tries)
        orders.put(shape, best, size_bytes(best))
    if best is None:
        return best_order(shape, costs, before_s)
    return best if before_s is None or _in_time(best, before_s) else None


def _sums_s(layout: Layout, costs: Costs) -> dict[int, float]:
    """Return, for each worker, the time of all its sums.

    Orders of routes that share workers are compared by them. Those of single routes are not: partitions of many kinds
    share them, which have other numbers of pipelines and so other sums.
    """
    found = dict.fromkeys(layout.workers, 0.0)
    for bucket in buckets(layout, costs):
        seconds = sum_s(costs, bucket, layout.copies)
        for worker in bucket.holders:
            found[worker] += seconds
    return found


def size_bytes(solved: Solved) -> int:
    """Return the bytes that an order takes in memory."""
    return sum(len(queue) * queue.itemsize for queue in solved.queues)


def _in_time(solved: Solved, before_s: list[float]) -> bool:
    return all(
        round(done_s * TICKS_PER_S) <= end_s * TICKS_PER_S - 1
        for done_s, end_s, queue in zip(solved.done_s, before_s, solved.queues, strict=True)
        if queue
    )


def independent(routes: tuple[Route, ...]) -> list[list[Route]]:
    """Return the routes in groups that share no worker with each other, each ascending by microbatches."""
    parent: dict[int, int] = {}

    def root(worker: int) -> int:
        while parent.setdefault(worker, worker) != worker:
            parent[worker] = worker = parent[parent[worker]]
        return worker

    for route in routes:
        for hop in route.hops:
            parent[root(hop.worker)] = root(route.hops[0].worker)
    groups: dict[int, list[Route]] = {}
    for route in sorted(routes, key=lambda route: route.microbatches):
        groups.setdefault(root(route.hops[0].worker), []).append(route)
    return list(groups.values())


def _looks(route: Route, caps: Mapping[int, int], speeds: Mapping[int, float]) -> tuple[object, ...]:
    """Return a key that tells routes apart, but not replicas of a pipeline. Routes that look alike keep their order."""
    hops = tuple((hop.first, hop.last, caps[hop.worker], speeds.get(hop.worker, 1.0)) for hop in route.hops)
    return (-len(route.microbatches), hops)


def _by_turn(routes: Sequence[Route]) -> tuple[int, ...]:
    """Return the microbatches of ``routes`` in the order of their turns.

    Those of each route are spread evenly over the step; those with the same turn are in the order of their routes. So
    the microbatches of a dead pipeline do not stand where their numbers would put them: it makes no difference which
    worker of a stage has died, and the order can be looked up.
    """
    counts = [len(route.microbatches) for route in routes]
    alike, longest = Counter(counts), max(counts)
    before: Counter[int] = Counter()
    places = []
    for at, (route, count) in enumerate(zip(routes, counts, strict=True)):
        for i, microbatch in enumerate(route.microbatches):
            turn = longest * (i * alike[count] + before[count]) // (count * alike[count])
            places.append((turn, at, microbatch))
        before[count] += 1
    return tuple(microbatch for _, _, microbatch in sorted(places))


def _shape(
    routes: list[Route],
    workers: tuple[int, ...],
    microbatches: tuple[int, ...],
    caps: Mapping[int, int],
    speeds: Mapping[int, float],
    costs: Costs,
) -> Shape:
    seat = {worker: i for i, worker in enumerate(workers)}
    spans: dict[int, set[tuple[int, int]]] = {worker: set() for worker in workers}
    for route in routes:
        for hop in route.hops:
            spans[hop.worker].add((hop.first, hop.last))
    used = {pair for route in routes for pair in _links(route)} if costs.slow_links else set()
    lags_s = costs.lags_s
    number = {microbatch: i for i, microbatch in enumerate(microbatches)}
    return Shape(
        routes=tuple(
            (
                tuple(number[m] for m in route.microbatches),
                tuple((seat[hop.worker], hop.first, hop.last) for hop in route.hops),
            )
            for route in routes
        ),
        caps=tuple(usable_bytes(caps[worker], spans[worker], costs) for worker in workers),
        speeds=tuple(speeds.get(worker, 1.0) for worker in workers),
        lags_s=tuple(sorted((seat[a], seat[b], lags_s[a, b]) for a, b in used & lags_s.keys())),
    )


def usable_bytes(cap_bytes: int, spans: Iterable[tuple[int, int]], costs: Costs) -> int:
    """Return ``cap_bytes`` rounded down to what a worker that computes ``spans`` can use for activations.

    That is a multiple of the greatest common divisor of the bytes that it keeps and frees. The rest is of no use; so
    layouts whose caps differ by a slice of optimizer state share one order.
    """
    early_bytes, kept_bytes, each = costs.spans.early_bytes, costs.spans.activation_bytes, 0
    for first, last in spans:
        each = gcd(each, early_bytes(first, last), kept_bytes(first, last))
    return cap_bytes - cap_bytes % each if each else cap_bytes


def _links(route: Route) -> Iterator[tuple[int, int]]:
    """Yield (sender, receiver) of the messages of ``route``."""
    for one, other in pairwise(route.hops):
        yield one.worker, other.worker
        yield other.worker, one.worker


def _check_caps(layout: Layout, costs: Costs, caps: Mapping[int, int]) -> None:
    for worker, need in minimum_bytes(layout, costs).items():
        if caps[worker] < need:
            raise PlanInfeasible(
                f"worker {worker} may keep {caps[worker]} bytes of activations, its routes need at "
                f"least {need}. Allow that much, or give the worker fewer layers."
            )
