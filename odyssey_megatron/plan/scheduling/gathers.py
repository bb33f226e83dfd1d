"""When new weights arrive if each holder of a layer only steps some slices of it.

After a step the holders of a bucket gather its weights, beside the first forwards of the next step, which wait for the
weights that they need. All workers gather the buckets in one order, in which a forward needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def weights_late_s(
    layout: Layout, buckets: Iterable[Block], costs: Costs, alike: Mapping[int, int] | None = None
) -> float:
    """Return how much longer a step is because its first forwards wait for weights.

    The whole step is taken to be late by as much as the latest weights are. 0.0 if each holder steps all that it holds.
    ``alike``: see ``reductions.holders_of``.
    """
    if not layout.copies:
        return 0.0
    free_s, arrived_s = dict.fromkeys(layout.workers, 0.0), list[tuple[Block, float]]()
    for one in gather_order(buckets, layout.num_layers):
        if took_s := gather_s(costs, one.first, one.last, holders_of(one, alike), layout.copies):
            end_s = took_s + max(free_s[worker] for worker in one.holders)
            free_s.update(dict.fromkeys(one.holders, end_s))
            arrived_s.append((one, end_s))
    late_s = max((end_s for one, end_s in arrived_s if one.first >= layout.num_layers), default=0.0)
    for spans in {route.spans for route in layout.routes}:
        reached_s = 0.0
        for first, last in spans:
            for one, end_s in arrived_s:
                if one.first < last and first < one.last:
                    needed_s = reached_s + costs.spans.forward_s(first, max(first, one.first))
                    late_s = max(late_s, end_s - needed_s)
            reached_s += costs.spans.forward_s(first, last) + costs.message_s()
    return late_s
