"""Memory: the bytes that a worker keeps for the layers it holds, and those that it may use for activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from math import ceil

from odyssey_megatron.cluster.state import WHOLE_CELL, Share
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.names import size_text
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import WHOLE, bytes_of, kept_shares


def state_bytes(layout: Layout, costs: Costs) -> dict[int, int]:
    """Return, for each worker, the bytes that stay through a step.

    These are weights and gradients of its layers, its slices of optimizer state, and messages that are kept.
    """
    total, optimizer = _message_bytes(layout, costs), _optimizer_bytes(layout, costs)
    for holders, alike in groupby(zip(layout.all_holders, costs.all_layers, strict=True), lambda row: row[0]):
        each = sum(one.weight_bytes + one.gradient_bytes for _, one in alike)
        for worker in holders:
            total[worker] += each
    return {worker: size + optimizer[worker] for worker, size in total.items()}


def _optimizer_bytes(layout: Layout, costs: Costs) -> dict[int, int]:
    """Return, for each worker, the bytes of its slices of optimizer state."""
    total = dict.fromkeys(layout.workers, 0)
    rows = zip(layout.states, costs.all_layers, strict=True)
    for found, alike in groupby(rows, lambda row: row[0]):
        optimizer = Counter(one.optimizer_bytes for _, one in alike)
        of_shares: dict[int, int] = {}
        for worker, shares in kept_shares(found).items():
            if shares not in of_shares:
                of_shares[shares] = sum(
                    count * ceil(one * shares / WHOLE) for one, count in optimizer.items()
                )
            total[worker] += of_shares[shares]
    return total


def _spare_bytes(layout: Layout, costs: Costs, worker: int) -> int:
    """Return the bytes of optimizer state that ``worker`` has for a failure only."""
    layers = costs.all_layers
    return sum(
        bytes_of(span, layers[layer].optimizer_bytes)
        for layer, spans in layout.spare_states(worker).items()
        for span in spans
    )


def _message_bytes(layout: Layout, costs: Costs) -> dict[int, int]:
    """Return, for each worker, the bytes of messages that it keeps until the step's end."""
    total = dict.fromkeys(layout.workers, 0)
    for route in layout.routes if costs.keeps_messages else ():
        size = len(route.microbatches) * costs.message_bytes
        for hop in route.hops:  # for each microbatch, an activation and an input gradient
            total[hop.worker] += 2 * size
        total[route.hops[0].worker] -= size
        total[route.hops[-1].worker] -= size
    return total


def one_f_one_b_bytes(layout: Layout, costs: Costs, extra: int = 0) -> dict[int, int]:
    """Return, for each worker, the bytes of activations that 1F1B keeps at its peak, plus ``extra`` microbatches.

    A stage with k stages behind it keeps ``min(microbatches, k + 1)`` in flight (Chameleon's Eq. 14, arXiv 2508.21613;
    the minimum is added here). A worker on several routes gets the largest of their needs, not the sum: rerouting does
    not raise the cap.
    """
    passing: dict[int, int] = {}
    for route in layout.routes:
        for hop in route.hops:
            passing[hop.worker] = passing.get(hop.worker, 0) + len(route.microbatches)
    caps, each = dict.fromkeys(layout.workers, 0), costs.spans.activation_bytes
    for route in layout.routes:
        for behind, hop in enumerate(reversed(route.hops)):
            in_flight, grown = min(passing[hop.worker], behind + 1 + extra), costs.spans.grown_bytes
            size = in_flight * each(hop.first, hop.last) + grown(hop.first, hop.last)
            caps[hop.worker] = max(caps[hop.worker], size)
    return caps


def fullest_bytes(layout: Layout, costs: Costs) -> int:
    """Return the bytes that the fullest worker needs under 1F1B, for state and activations.

    It serves as the budget of all workers if memory is not known. No worker needs more, not even one that is visited
    more than once.
    """
    state, activations = state_bytes(layout, costs), activation_caps(layout, costs)
    return max(state[worker] + activations[worker] for worker in state)


def minimum_bytes(layout: Layout, costs: Costs) -> dict[int, int]:
    """Return, for each worker, the least bytes of activations with which every order of the routes can finish.

    It is one microbatch at each distinct depth at which the worker is visited: while it holds a shallow visit it
    must still be able to admit the deeper ones that the shallow one waits for. The input gradient of one of them may
    add to that.
    """
    grown = dict.fromkeys(layout.workers, 0)
    needs: dict[int, dict[int, int]] = {worker: {} for worker in layout.workers}
    each = costs.spans.activation_bytes
    for worker, first, last in {
        (hop.worker, hop.first, hop.last) for route in layout.routes for hop in route.hops
    }:
        at = needs[worker]
        at[first] = max(at.get(first, 0), each(first, last))
        grown[worker] = max(grown[worker], costs.spans.grown_bytes(first, last))
    return {worker: sum(at.values()) + grown[worker] for worker, at in needs.items()}


def activation_caps(
    layout: Layout,
    costs: Costs,
    *,
    extra: int = 0,
    budget_bytes: int | None = None,
    taken_bytes: int = 0,
    shares: Mapping[int, Share] | None = None,
) -> dict[int, int]:
    """Return, for each worker, the bytes of activations that a schedule may keep, counted as for a whole cell's rank.

    Args:
        extra: number of microbatches above 1F1B's in-flight number.
        budget_bytes: memory of one worker for state and activations. All of it that the state leaves
            may be used, wherever in the pipeline the worker is, and ``extra`` does not matter.
        taken_bytes: the part of it that something else may fill, so that only what must be kept is kept there.
        shares: those of workers that are not whole cells. Their budget is scaled down, since what fills one of their
            ranks takes less memory on a whole cell's rank.

    Raises:
        PlanInfeasible: ``budget_bytes`` is too small for some worker; says what it needs at the least.
    """
    floor = minimum_bytes(layout, costs)
    if budget_bytes is None:
        wanted: Mapping[int, int] = one_f_one_b_bytes(layout, costs, extra)
        return {worker: max(floor[worker], wanted[worker]) for worker in floor}
    state, shares = state_bytes(layout, costs), shares or {}
    most = _alike(layout, state)
    if shares:
        parts = _message_bytes(layout, costs), _alike(layout, _optimizer_bytes(layout, costs))
        state, most = (_beside_activations(one, *parts, shares) for one in (state, most))
    budget = {worker: int(budget_bytes * shares.get(worker, WHOLE_CELL).ranks) for worker in floor}
    for worker, least in floor.items():
        if state[worker] + least > budget[worker]:
            share = shares.get(worker, WHOLE_CELL).ranks
            spare = shares.get(worker, WHOLE_CELL).scaled(*[_spare_bytes(layout, costs, worker)] * 2)
            sizes = (state[worker] + least, state[worker], least, spare)
            needs = [size_text(round(size / share)) for size in sizes]
            ranks = f", which counts as {share:.0%} of a cell," if share != 1.0 else ""
            of_it = f", {needs[3]} of it copies of optimizer state that only a failure needs" if spare else ""
            raise PlanInfeasible(
                f"worker {worker}{ranks} needs {needs[0]} ({needs[1]} of state{of_it}, {needs[2]} of activations at "
                f"the least), and {size_text(budget_bytes)} may be used"
            )
    taken = {worker: int(taken_bytes * shares.get(worker, WHOLE_CELL).ranks) for worker in floor}
    return {
        worker: max(least, budget[worker] - taken[worker] - most[worker]) for worker, least in floor.items()
    }


def caps_for(
    layout: Layout, costs: Costs, shares: Mapping[int, Share] | None = None, taken_bytes: int = 0
) -> dict[int, int]:
    """Return the bytes of activations for each worker. Raises PlanInfeasible if it has too little memory.

    ``taken_bytes``: those that something else may fill; see :func:`activation_caps`.
    GPUs are alike, so if memory is not known each worker may use as much as 1F1B's fullest worker needs. A worker that
    is not a whole cell (``shares``) may use what it needs itself, or no plan would have it.
    """
    if costs.memory_bytes is not None:
        return activation_caps(
            layout, costs, budget_bytes=costs.memory_bytes, taken_bytes=taken_bytes, shares=shares
        )
    caps = activation_caps(layout, costs, budget_bytes=fullest_bytes(layout, costs))
    own = activation_caps(layout, costs) if shares else {}
    return caps | {worker: own[worker] for worker in own.keys() & (shares or {}).keys()}


def _alike(layout: Layout, state: Mapping[int, int]) -> Mapping[int, int]:
    """Return ``state`` with each worker counted as that one with the same layers which keeps most optimizer state.

    So pipelines that are alike have the same caps, and one schedule: a step is as long as the longest of them anyway.
    """
    if not layout.keepers:
        return state
    held: dict[int, list[int]] = {worker: [] for worker in state}
    for layer, holders in enumerate(layout.all_holders):
        for worker in holders:
            held[worker].append(layer)
    most: dict[tuple[int, ...], int] = {}
    for worker, layers in held.items():
        most[tuple(layers)] = max(most.get(tuple(layers), 0), state[worker])
    return {worker: most[tuple(layers)] for worker, layers in held.items()}


def per_rank(
    peak_bytes: tuple[tuple[int, int], ...], shares: Mapping[int, Share], layout: Layout, costs: Costs
) -> tuple[tuple[int, int], ...]:
    """Return the peak bytes of each worker's own ranks, from ``peak_bytes`` as if all workers were whole cells."""
    if not shares:
        return peak_bytes
    state, beside = state_bytes(layout, costs), beside_activations(layout, costs, shares)
    return tuple(
        (worker, ceil((size - state[worker] + beside[worker]) / shares.get(worker, WHOLE_CELL).ranks))
        for worker, size in peak_bytes
    )


def beside_activations(layout: Layout, costs: Costs, shares: Mapping[int, Share]) -> dict[int, int]:
    """Return :func:`state_bytes`, but for workers that are not whole cells (``shares``) what a whole cell's rank would
    have if it had ``Share.ranks`` times the bytes of their ranks.
    """
    parts = _message_bytes(layout, costs), _optimizer_bytes(layout, costs)
    return _beside_activations(state_bytes(layout, costs), *parts, shares)


def _beside_activations(
    state: Mapping[int, int],
    messages: Mapping[int, int],
    optimizer: Mapping[int, int],
    shares: Mapping[int, Share],
) -> dict[int, int]:
    """Return the bytes of ``state`` that count, beside activations, against each worker's scaled budget.

    ``messages``: the part of it that are messages, of which a rank has as many times those of a whole cell's as of
    activations. ``optimizer``: the part that is optimizer state.
    """
    return {
        worker: messages[worker]
        + ceil(shares.get(worker, WHOLE_CELL).scaled(size - messages[worker], optimizer[worker]))
        for worker, size in state.items()
    }
