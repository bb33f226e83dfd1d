"""What the next decision will look up, worked out while the job trains."""

from __future__ import annotations

from collections import Counter

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.plan.assemble import lowered
from odyssey_megatron.plan.transfer import warm_up
from odyssey_megatron.policy.profile import Profile
from odyssey_megatron.policy.search import search_for

_MOST_LOST = 64
"""Losses of 1, 2, 4, ... workers are prepared for, up to so many, beside all that one node can lose: what fails
together, as the nodes of a rack or on one switch, is mostly such a number.
"""


def prepare(job: JobSpec, state: ClusterState, profile: Profile, *, is_measured: bool) -> None:
    """Works out what the next decision will look up, so that a recovery does not wait for it.

    Optional; worth calling after each change of the profile or of the membership, off the critical path.

    Args:
        is_measured: costs are not estimated ones, for whose few steps only what is likely is prepared.
    """
    warm_up()
    costs = profile.costs
    search = search_for(costs, costs.memory_bytes, job.optimizer_copies, revisits=job.revisits)
    alive = len(state.alive)
    node = max(Counter(worker.node for worker in state.workers if worker.alive).values(), default=1)
    together = {2**n for n in range(_MOST_LOST.bit_length()) if 2 ** (n + 2) <= alive} | {1, node}
    together |= {*range(1, node)} if is_measured else set()
    for lost in sorted(together):
        workers = alive - lost
        if workers <= 0:
            continue
        for found in search.partitions(workers, job.num_microbatches, thorough=True)[:1]:
            for order in search.solved(found, workers, job.num_microbatches):
                lowered(order, costs)
