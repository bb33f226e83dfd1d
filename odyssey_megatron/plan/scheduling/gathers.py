"""When the weights for the next step are there: after a worker's optimizer, and where each holder of a layer only steps
some slices of it, after those of others have arrived.

Once its optimizer is through, a worker goes on with the next step. The holders of a bucket gather its weights beside
the first forwards, which wait for the weights that they need. All workers gather the buckets in one order, in which a
forward needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.scheduling.reductions import holders_of


def gather_order(buckets: Iterable[Block], num_layers: int) -> list[Block]:
    """Return ``buckets`` in the order in which all workers gather them: the tied weight first, then by layer."""
    return sorted(buckets, key=lambda one: (one.first < num_layers, one.first))


def gather_s(costs: Costs, first: int, last: int, holders: int, copies: int = 1) -> float:
    """Return the time in which ``holders`` gather a bucket's weights, of which ``copies`` step each number.

    0.0 if each holder steps all. Those ranks of theirs gather that have the same; of experts that are spread over ranks
    these are others than of the rest.
    """
    of_experts = costs.spans.expert_bytes(first, last)
    rest = costs.spans.weight_bytes(first, last) - of_experts
    seconds = _ring_s(costs, rest, holders, copies, costs.stretches)
    return seconds + (
        _ring_s(costs, of_experts, holders, copies, costs.expert_stretches) if of_experts else 0.0
    )


def _ring_s(costs: Costs, size: int, holders: int, copies: int, stretches: int) -> float:
    """Return the time of a ring all-gather of ``size`` bytes by k ranks of all holders, ``stretches`` of each.

    It sends (k - 1) / k of the bytes, half as much as an all-reduce.
    """
    if holders <= copies and stretches == 1:
        return 0.0
    ranks = holders * stretches
    return (ranks - 1) * (costs.link_latency_s + size / ranks / costs.link_bytes_per_s)


def least_late_s(costs: Costs, holders: int, copies: int) -> float:
    """Return a lower bound on :func:`weights_late_s` for any layout with at least ``holders`` holders of each layer.

    No forward begins before the embedding's weights have arrived, and the tied weight if there is one.
    """
    if not copies:
        return 0.0
    last = len(costs.layers)
    shared_s = gather_s(costs, last, last + 1, holders, copies) if costs.tied else 0.0
    return shared_s + gather_s(costs, 0, 1, holders, copies)


def optimizers_s(
    layout: Layout, buckets: Iterable[Block], costs: Costs, alike: Mapping[int, int] | None = None
) -> dict[int, float]:
    """Return, for each worker, the time of its optimizer, which steps all state that the worker keeps; empty if that
    counts as nothing.

    ``alike``: see ``reductions.holders_of``.
    """
    own_s: dict[int, float] = {}
    for one in buckets if costs.optimizer_s_per_byte else ():
        share = min(1.0, layout.copies / holders_of(one, alike)) if layout.copies else 1.0
        seconds = costs.optimizer_s_per_byte * costs.spans.stepped_bytes(one.first, one.last) * share
        for worker in one.holders:
            own_s[worker] = own_s.get(worker, 0.0) + seconds
    return own_s | {worker: own_s[worker] * more for worker, more in costs.long_optimizers if worker in own_s}


def weights_late_s(
    layout: Layout, buckets: Sequence[Block], costs: Costs, alike: Mapping[int, int] | None = None
) -> float:
    """Return how much longer a step is because its first forwards wait for weights.

    A worker computes once its own optimizer is through, and gathers from there on what others have stepped. The whole
    step is taken to be late by as much as the latest weights are: those of a later stage may take longer, by as long as
    the first microbatch takes to get there. ``alike``: see ``reductions.holders_of``.
    """
    own_s = optimizers_s(layout, buckets, costs, alike)
    if not layout.copies and not own_s:
        return 0.0
    arrived_s = _arrived_s(layout, buckets, costs, own_s, alike) if layout.copies else []
    late_s = max((end_s for one, end_s in arrived_s if one.first >= layout.num_layers), default=0.0)
    reached_s: dict[tuple[tuple[int, int], ...], list[float]] = {}
    for route in layout.routes:
        if (spans := route.spans) not in reached_s:
            reached_s[spans] = reached = _reached_s(spans, costs)
            for (first, last), at_s in zip(spans, reached, strict=True):
                for one, end_s in arrived_s:
                    if one.first < last and first < one.last:
                        needed_s = at_s + costs.spans.forward_s(first, max(first, one.first))
                        late_s = max(late_s, end_s - needed_s)
        for hop, at_s in zip(route.hops if own_s else (), reached_s[spans], strict=False):
            late_s = max(late_s, own_s[hop.worker] - at_s)
    return late_s


def ending_s(layout: Layout, buckets: Sequence[Block], costs: Costs) -> float:
    """Return how much longer than until all have computed and summed a step takes: the agreement, and then
    :func:`weights_late_s`.
    """
    return costs.agreement_s + weights_late_s(layout, buckets, costs)


def _arrived_s(
    layout: Layout,
    buckets: Iterable[Block],
    costs: Costs,
    own_s: Mapping[int, float],
    alike: Mapping[int, int] | None,
) -> list[tuple[Block, float]]:
    """Return each bucket that is gathered, and when its weights have arrived. ``own_s``: see :func:`optimizers_s`."""
    free_s, found = {**dict.fromkeys(layout.workers, 0.0), **own_s}, list[tuple[Block, float]]()
    for one in gather_order(buckets, layout.num_layers):
        if took_s := gather_s(costs, one.first, one.last, holders_of(one, alike), layout.copies):
            end_s = took_s + max(free_s[worker] for worker in one.holders)
            free_s.update(dict.fromkeys(one.holders, end_s))
            found.append((one, end_s))
    return found


def _reached_s(spans: Iterable[tuple[int, int]], costs: Costs) -> list[float]:
    """Return when the first forward reaches each of the hops ``spans`` of a route, if it waits for nothing."""
    at_s, found = 0.0, list[float]()
    for first, last in spans:
        found.append(at_s)
        at_s += costs.spans.forward_s(first, last) + costs.message_s()
    return found
