"""Preparation: what the next decision will look up is worked out while the job trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.shapes.search import search_for
from odyssey_megatron.policy.shapes.slide import slid
from odyssey_megatron.policy.shapes.turns import TURNS

_MOST_LOST = 64
"""Losses of 1, 2, 4, ... workers are prepared for, up to this number, besides all that one node can lose. What fails
together, such as the nodes of a rack or on one switch, is mostly such a number.
"""
_MOST_NODES = 8
"""Losses of so many whole nodes are prepared for, too, of up to a quarter of all workers: each takes about a second."""

_NODES_APART = 3
"""Up to as many losses as that many nodes have workers, those of other numbers, which workers rarely have in common,
are prepared for as far as a decision would look itself: each takes about a tenth of a second.
"""


def prepare(job: JobSpec, state: ClusterState, profile: Profile) -> None:
    """Work out what the next decision will look up, so that a recovery does not wait for it.

    Optional; worth calling after each change of the profile or of the membership, off the critical path.
    """
    costs = profile.costs
    search = search_for(costs, costs.memory_bytes, job.optimizer_copies, revisits=job.revisits)
    alive, likely = len(state.alive), losses(state)
    for lost in likely:
        prepare_for(alive - lost, job, profile)
    others = range(1, min(_NODES_APART * _per_node(state), alive // 4 + 1))
    for number in (alive - lost for lost in others if lost not in likely):
        for look in (search.partitions, partial(slid, search)):
            TURNS.run(partial(look, number, job.num_microbatches), yields=True)


def prepare_for(workers: int, job: JobSpec, profile: Profile) -> None:
    """Search thoroughly for pipelines of that many ``workers``, as a running job has before it loses the others.

    A thread that decides goes first.
    """
    costs = profile.costs
    search = search_for(costs, costs.memory_bytes, job.optimizer_copies, revisits=job.revisits)
    search.partitions(workers, job.num_microbatches, thorough=True)


def _per_node(state: ClusterState) -> int:
    """Return the number of living workers on the node that has most."""
    return max(Counter(worker.node for worker in state.workers if worker.alive).values(), default=1)


def losses(state: ClusterState) -> list[int]:
    """Return the numbers of workers that may be lost together; see :func:`prepare`."""
    alive, node = len(state.alive), _per_node(state)
    nodes = range(node, _MOST_NODES * node + 1, node)
    found = {2**n for n in range(_MOST_LOST.bit_length()) if 2 ** (n + 2) <= alive}
    found |= {1, *range(1, node + 1), *(lost for lost in nodes if 4 * lost <= alive)}
    return sorted(lost for lost in found if lost < alive)


def incidents(current: Plan, state: ClusterState) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that die together in each incident that decisions are rehearsed for.

    First a rank of each kind of worker. Then numbers of workers from all over the cluster, whose deaths leave some copy
    of each layer's state.
    """
    ranks, alive, owners = [worker.ranks for worker in state.workers], state.alive, current.layout.owners
    yield from (ranks[worker][:1] for worker, *_ in one_of_each(current, state))
    kept_by = {worker: [{*own} for kind in {*owners} for own in kind if worker in own] for worker in alive}
    for lost in losses(state)[1:]:
        gone, apart = set[int](), len(alive) // lost
        for worker in (one for first in range(apart) for one in alive[first::apart]):
            if len(gone) < lost and not any(own <= gone | {worker} for own in kept_by[worker]):
                gone.add(worker)
        yield tuple(rank for worker in sorted(gone) for rank in ranks[worker])


def one_of_each(plan: Plan, state: ClusterState) -> list[list[int]]:
    """Return the living workers in groups, in each of which any worker's death leads to an equal plan.

    The workers of a group compute the same layers for as many microbatches, keep optimizer state of the same layers,
    and are equally fast and large.
    """
    counts: dict[int, Counter[tuple[int, int]]] = {worker: Counter() for worker in state.alive}
    for route in plan.layout.routes:
        for hop in route.hops:
            if hop.worker in counts:
                counts[hop.worker][hop.first, hop.last] += len(route.microbatches)
    kept: dict[int, list[int]] = {worker: [] for worker in state.alive}
    for layer, keepers in enumerate(plan.layout.keepers):
        for worker in kept.keys() & set(keepers):
            kept[worker].append(layer)
    alike: dict[tuple[object, ...], list[int]] = {}
    for worker, own in counts.items():
        its = state.workers[worker]
        key = frozenset(own.items()), tuple(kept[worker]), its.pace, its.share
        alike.setdefault(key, []).append(worker)
    return list(alike.values())
