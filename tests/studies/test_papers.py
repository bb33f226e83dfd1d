"""Our models of other systems beside figures that were published of them, or follow from them exactly (papers.md)."""

from __future__ import annotations

import random

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.plan.generate import build_schedule
from odyssey_megatron.plan.simulate import simulate
from odyssey_megatron.policy.profile import Profile
from odyssey_megatron.policy.rerouting import reroute
from odyssey_megatron.policy.search import Rate, min_max_shares
from odyssey_megatron.studies.baselines import (
    Chameleon,
    Oobleck,
    ReCycle,
    Running,
    World,
    healthy_layout,
    one_f_one_b_step_s,
)
from tests.plan.samples import uniform_costs

SLOTS = {
    # pipelines, microbatches of each, failures (pipeline, stage): healthy, Eq. 13, the least slots that any order takes
    # with a fused backward, with a decoupled one, and with the optimizer staggered, too
    (3, 6, ((0, 0),)): (27, 36, 36, 30, 27),
    (3, 6, ((0, 3),)): (27, 36, 36, 30, 27),
    (3, 6, ((0, 1),)): (27, 36, 33, 29, 27),
    (3, 6, ((0, 2),)): (27, 36, 33, 29, 27),
    (3, 6, ((1, 1), (2, 2))): (27, 45, 34, 29, 27),
    (3, 6, ((1, 1), (2, 1))): (27, 63, 60, 54, 54),
    (4, 8, ((1, 1), (2, 1))): (33, 57, 48, 48, 48),
    (4, 8, ((0, 0), (1, 1), (2, 2), (3, 3))): (33, 65, 42, 32, 32),
    (2, 8, ((0, 1),)): (33, 57, 54, 50, 48),
}
"""papers.md §1.7: four stages, forward 1 slot, backward 2. Where no optimum was proved, the bound by work."""
RATIOS = {
    (4, 2, 8): 1.727, (4, 4, 8): 1.242, (4, 8, 8): 1.104, (8, 4, 8): 1.178, (8, 4, 16): 1.232, (8, 4, 32): 1.274,
    (2, 16, 16): 1.063, (4, 8, 32): 1.131, (8, 8, 64): 1.129, (16, 4, 64): 1.270,
}  # fmt: skip
"""papers.md §7.3: (stages, pipelines, microbatches of each) -> Eq. 12 for one failure, over the healthy step."""


def world(stages, pipelines, microbatches):
    """One slot a stage and pass; embedding and head cost nothing."""
    job = JobSpec(
        num_layers=stages + 2,
        pipeline_model_parallel_size=stages,
        tensor_model_parallel_size=1,
        num_microbatches=pipelines * microbatches,
        tokens_per_step=1,
        train_steps=1,
    )
    profile = Profile(costs=uniform_costs(stages, ends=True))
    return World(job=job, profile=profile, workers=tuple(range(stages * pipelines)), mtbf_s=1e9)


@pytest.mark.parametrize("case", SLOTS, ids=str)
def test_slots_of_rerouting(case):
    """Models are no faster than what is possible, and not so slow that anybody would win against them."""
    pipelines, microbatches, failures = case
    healthy_slots, estimate, fused, decoupled, staggered = SLOTS[case]
    job = world(4, pipelines, microbatches)
    costs, healthy = job.profile.costs, healthy_layout(job, job.workers)
    dead = {stage * pipelines + pipeline for pipeline, stage in failures}
    alive = tuple(sorted(set(job.workers) - dead))
    assert one_f_one_b_step_s(healthy, costs) == healthy_slots
    estimated, rerouted = Chameleon()._rerouted(job, alive)
    assert estimated == estimate
    assert fused <= rerouted.step_s <= estimate + 1
    after = reroute(healthy, alive, costs)
    assert decoupled <= simulate(build_schedule(after, costs), after, costs).step_s < rerouted.step_s
    recycle = ReCycle().change(job, Running(layout=healthy, step_s=0.0, downtime_s=0.0), alive)
    assert staggered <= recycle.step_s <= 1.19 * staggered


@pytest.mark.parametrize("case", RATIOS, ids=str)
def test_chameleons_estimate_of_one_failure(case):
    stages, pipelines, microbatches = case
    job = world(stages, pipelines, microbatches)
    estimated, _ = Chameleon()._rerouted(job, job.workers[:-1])
    assert estimated / ((stages + microbatches - 1) * 3) == pytest.approx(RATIOS[case], abs=5e-4)


@pytest.mark.parametrize("seed", range(20))
def test_oobleck_covers_all_numbers_of_nodes(seed):
    """One failure to survive, pipelines of at least 3: from 13 nodes down to 6 there are always two (§7.2, 5)."""
    rng = random.Random(seed)
    groups = [list(range(6)), list(range(6, 13))]
    for nodes in range(12, 5, -1):
        victim = rng.choice([worker for group in groups for worker in group])
        groups = Oobleck()._regroup([[w for w in group if w != victim] for group in groups], [], 3)
        assert len(groups) >= 2
        assert min(map(len, groups)) >= 3
        assert len({worker for group in groups for worker in group}) == sum(map(len, groups)) == nodes


def test_shares_of_unequal_pipelines():
    """§7.2, 7: ten microbatches over pipelines that take 6, 10 and 15 for one."""
    assert min_max_shares(10, [Rate(head_s=0.0, each_s=each) for each in (6.0, 10.0, 15.0)]) == (5, 3, 2)
