"""What is said of communicators is what ranks have: counted from the layout there, from programs here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.placing.communicators import (
    GROUP_BYTES,
    PAIR_BYTES,
    Needs,
    communicators,
    connect_s,
    taken_bytes,
)
from odyssey_megatron.plan.placing.groups import (
    WORLD,
    group_members,
    passes,
    timed_group,
    timed_pairs,
    way_of,
)
from odyssey_megatron.plan.placing.memory import caps_for, minimum_bytes
from odyssey_megatron.plan.placing.transfer import plan_transfers
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.plan.samples import layer, preset_profile, uniform_costs

CELLS = {
    "one rank": Cell(rank=0),
    "tensor 2": Cell.of(0, tensor=2),
    "tensor 2, context 2": Cell.of(0, tensor=2, context=2),
    "tensor 2, expert 2": Cell.of(0, tensor=2, expert=2),
}


def of_rank(plan, worker, cell, *, beside=False, first=False):
    """Two lists of (ranks of a group, which way it is used): of those that it connects, and of those that it trains
    with. ``first``: with the one in which a link is timed.
    """
    mine = Cell(
        rank=worker * cell.full, size=cell.size, context=cell.context, lanes=cell.lanes, expert=cell.expert,
        expert_tensor=cell.expert_tensor,
    )  # fmt: skip
    named = group_members(plan, (0, 1), Cells(mine), tagged=False, beside=beside)
    for pair in timed_pairs(plan.layout) if first else ():
        if worker in pair:
            named |= timed_group(*(one * cell.full for one in pair))
    connects = {name: ranks for name, ranks in named.items() if len(ranks) > 1 and name != WORLD}
    trains = {name for name in connects if beside or not passes(name)}
    return [[(connects[name], way_of(name)) for name in names] for names in (connects, trains)]


def plans(stages, replicas, policy, redundancy):
    """Healthy, and with a worker dead."""
    job = JobSpec(
        num_layers=10, pipeline_model_parallel_size=stages, tensor_model_parallel_size=1, num_microbatches=12,
        tokens_per_step=12, train_steps=1, least_holders=2 if redundancy else 0, is_tied=True,
    )  # fmt: skip
    profile = Profile(costs=replace(uniform_costs(10), tied=layer(0.0, 0.0, 0.0, 0)))
    state = initial_state(nodes=(0,) * (stages * replicas))
    healthy = initial_plan(job, state, profile)
    dead = apply(state, RankDied(rank=1, code=-9, cause="killed"))
    config = OdysseyConfig(policy=policy)
    after = decide(job=job, state=dead, previous=healthy, profile=profile, config=config, now_s=1.0)
    return healthy, after


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("policy", ["reroute", "replan"])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 3), (2, 2), (4, 1), (4, 3)])
def test_what_is_said_is_what_ranks_have(stages, replicas, policy, cell):
    """At the start; behind a failure; where the dead worker is back, between two steps; and where it leaves."""
    healthy, decision = plans(stages, replicas, policy, redundancy=replicas == 1)
    after = decision.plan

    def going_to(plan, layout):
        moves = plan_transfers(layout, plan.layout, after.layout.workers, decision.case.profile.costs)
        return replace(plan, transfers=moves)

    back, left = going_to(healthy, after.layout), going_to(after, healthy.layout)
    previous, there = None, {}
    for plan, beside in ((healthy, False), (after, False), (back, True), (left, True)):
        needs, first = Needs(plan.layout, plan.transfers, beside), previous is None
        told = communicators(needs, cell, previous)
        of_all = {
            worker: of_rank(plan, worker, cell, beside=beside, first=first)
            for worker in healthy.layout.workers
            if worker in plan.layout.workers
        }
        anew = {
            worker: Counter(connects) - there.get(worker, Counter())
            for worker, (connects, _) in of_all.items()
        }
        have = {worker: Counter(trains) for worker, (_, trains) in of_all.items()}
        assert told.count == max(own.total() for own in have.values())
        assert told.anew == max(own.total() for own in anew.values())
        assert told.num_bytes == max(
            sum(PAIR_BYTES if len(ranks) == 2 else GROUP_BYTES for ranks, _ in own.elements())
            for own in have.values()
        )
        slowest_s = max((connect_s(len(ranks)) for own in anew.values() for ranks, _ in own), default=0.0)
        assert told.connect_s == pytest.approx(slowest_s)
        # What only served to begin is gone.
        lasting = replace(plan, transfers=())
        previous, there = needs, {worker: Counter(of_rank(lasting, worker, cell)[0]) for worker in have}


def test_a_decision_for_gpus_says_what_it_connects():
    _, decision = plans(2, 3, "reroute", redundancy=False)
    (chosen,) = (row for row in decision.candidates if row.chosen)
    assert "communicators of a rank to connect, with NCCL in 1.1 s" in chosen.reason


def test_times_are_those_published():
    """NVIDIA-NeMo/RL's pull request 3334: 1.41 s for 32 ranks, 1.67 s for 256, 3.79 s for 1,024."""
    for ranks, seconds in ((32, 1.41), (256, 1.67), (1024, 3.79)):
        assert connect_s(ranks) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("counts", [True, False], ids=["counted", "not"])
def test_a_plan_and_its_communicators_fit_a_gpu(tmp_path, counts):
    """13B on 16 H100, of whose memory one percent is kept aside: at the start and with a worker dead."""
    profile = preset_profile("llama2-13b", "h100", headroom_percent=1)
    job = JobSpec(
        num_layers=len(profile.costs.layers), pipeline_model_parallel_size=8, tensor_model_parallel_size=1,
        num_microbatches=32, tokens_per_step=12, train_steps=1,
    )  # fmt: skip
    config = OdysseyConfig(
        device="cuda" if counts else "cpu", memory_headroom_percent=1, layout="auto", run_dir=str(tmp_path)
    )
    planner, state = PolicyPlanner(config), initial_state(nodes=(0,) * 16)
    healthy = planner.start(job, state, to_json(profile)).plan
    after = planner.decide(apply(state, RankDied(rank=5, code=-9, cause="killed")), healthy, 1.0).plan
    before = Needs(healthy.layout)
    fullest = [
        max(size for _, size in plan.peak_bytes) + communicators(needs, job.cell(0), previous).num_bytes
        for plan, needs, previous in (
            (healthy, before, None), (after, Needs(after.layout, after.transfers), before),
        )
    ]  # fmt: skip
    assert all(one <= 80 * 2**30 for one in fullest) == counts, fullest


def test_communicators_fill_what_is_kept_aside_first():
    healthy, _ = plans(2, 2, "reroute", redundancy=False)
    job, needs = JobSpec(
        num_layers=10, pipeline_model_parallel_size=2, tensor_model_parallel_size=1, num_microbatches=12,
        tokens_per_step=12, train_steps=1,
    ), Needs(healthy.layout)  # fmt: skip
    all_of_them = communicators(needs, job.cell(0)).num_bytes
    taken = [
        taken_bytes(needs, replace(job, aside_bytes=aside))
        for aside in (None, 2 * all_of_them, all_of_them - 1)
    ]
    assert taken == [0, 0, 4 * 2**30], "in steps"
    costs = replace(uniform_costs(10), tied=layer(0.0, 0.0, 0.0, 0), memory_bytes=1000)
    caps = [caps_for(healthy.layout, costs, None, taken)[0] for taken in (0, 1, 10**9)]
    assert caps[1] == caps[0] - 1
    assert caps[2] == minimum_bytes(healthy.layout, costs)[0], "what must be kept is kept: they may need less"
