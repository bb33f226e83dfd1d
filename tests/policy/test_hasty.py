"""A loss while a rank is slow: what was not rehearsed is not searched for while the job waits, but right behind it."""

from __future__ import annotations

import pytest

from odyssey_megatron.cluster.events import RankDied, RankJoined
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state, with_slow_links, with_speeds
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.shapes.turns import TURNS
from tests.plan.samples import uniform_costs


def job_of(folder, workers, speeds, stages=4, layers=16, ranks=1):
    """A planner, its first plan, the cluster in which some workers are slow, and that without the first worker."""
    job = JobSpec(
        num_layers=layers + 2, pipeline_model_parallel_size=stages, tensor_model_parallel_size=ranks,
        num_microbatches=4 * workers // stages, tokens_per_step=1000, train_steps=10**6,
    )  # fmt: skip
    planner = PolicyPlanner(OdysseyConfig(run_dir=str(folder), rebalance="auto"))
    healthy = initial_state(nodes=(0,) * workers * ranks, started_s=0.0, **job.cells)
    costs = uniform_costs(layers, ends=True)
    plan = planner.start(job, healthy, to_json(Profile(costs=costs))).plan
    slow = with_speeds(healthy, speeds)
    return planner, plan, slow, apply(slow, RankDied(rank=0, code=-9, cause="killed", t_s=1.0))


def test_what_was_rehearsed_is_not_decided_in_haste(tmp_path):
    planner, plan, slow, left = job_of(tmp_path, 12, {5: 0.7})
    hasty = planner.decide(left, plan, 2.0)
    assert hasty.is_hasty
    planner.rehearse(slow, plan, 3.0)
    known = planner.decide(left, plan, 4.0)
    assert not known.is_hasty
    assert known.last.step_s < 0.95 * hasty.last.step_s


def test_behind_a_hasty_decision_a_better_plan_is_found(tmp_path):
    planner, plan, _, left = job_of(tmp_path, 14, {5: 0.6}, stages=2)  # not those above: searches are kept
    hasty = planner.decide(left, plan, 2.0).last
    better = planner.rebalance(left, hasty, 3.0, 1e6).decided
    assert not better.is_hasty
    assert better.plan.step_s < 0.95 * hasty.step_s


def test_a_small_job_takes_the_time(tmp_path):
    planner, plan, _, left = job_of(tmp_path, 8, {5: 0.7})
    assert not planner.decide(left, plan, 2.0).is_hasty


def test_beside_a_slow_link_all_share_what_a_dead_worker_leaves(tmp_path):
    """As they do without: only shapes with pipelines of their own were proposed, up to 6 % slower."""
    planner, plan, _, left = job_of(tmp_path, 12, {})
    one, other = (hop.worker for hop in plan.layout.routes[1].hops[:2])
    slow = with_slow_links(left, {(one, other): 3.0})
    without, beside = planner.decide(left, plan, 2.0), planner.decide(slow, plan, 2.0)
    assert (without.is_hasty, beside.is_hasty) == (False, True)
    assert without.last.policy == beside.last.policy == "slide"
    assert beside.last.step_s == without.last.step_s


@pytest.mark.parametrize("speeds", [{9: 0.8}, {9: 0.5, 30: 0.7}])
def test_a_large_job_does_without_the_slow_ones(tmp_path, speeds):
    """It lays out one shape, and that was one for equal workers, in which a slow one holds up its whole pipeline."""
    planner, plan, _, left = job_of(tmp_path, 320, speeds)
    decided = planner.decide(left, plan, 2.0)
    assert decided.is_hasty
    for worker in speeds:
        left = apply(left, RankDied(rank=worker, code=-9, cause="killed", t_s=1.0))
    assert decided.last.step_s <= planner.decide(left, plan, 2.0).last.step_s


def test_a_cell_that_comes_back_smaller_gets_a_place_that_is_cut_for_it(tmp_path):
    """The job trains meanwhile."""
    planner, plan, _, left = job_of(tmp_path, 14, {}, stages=2, ranks=4)
    plan = planner.decide(left, plan, 2.0).last
    for rank in (0, 1):
        left = apply(left, RankJoined(rank=rank, node=0, incarnation=1, size=2))
    with TURNS.giving_way():
        decided = planner.decide(left, plan, 3.0)
    assert not decided.is_hasty
    assert 0 in decided.last.layout.workers
    assert decided.last.step_s < plan.step_s
    gone = apply(left, RankDied(rank=52, code=-9, cause="killed", t_s=4.0))
    assert planner.decide(gone, decided.last, 4.0).is_hasty, "in the middle of a step"
