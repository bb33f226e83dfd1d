"""``--odyssey-redundancy auto``: what it chooses, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import initial_state
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.redundancy import MODES, choose, possible
from tests.plan.samples import uniform_costs

HOUR_S = 3600.0
JOB = JobSpec(
    num_layers=10, pipeline_model_parallel_size=4, tensor_model_parallel_size=1, num_microbatches=8,
    tokens_per_step=8000, train_steps=10, least_holders=2,
)  # fmt: skip


def weigh(
    mtbf_s, *, among=MODES, stages=4, workers=4, resumes=True, restart_s=300.0, gradients_s=0.0, **costs
):
    """(mode chosen, mode -> row). ``gradients_s``: what summing a layer's gradients over two holders takes."""
    job = replace(JOB, pipeline_model_parallel_size=stages)
    # A layer's gradients are one byte, and a sum over two sends them once.
    bytes_per_s = 1.0 / gradients_s if gradients_s else float("inf")
    memory = {"memory_bytes": 60} | costs
    base = replace(uniform_costs(8, ends=True), link_bytes_per_s=bytes_per_s, **memory)
    profile = Profile(costs=base, restart_s=restart_s)
    found, without = possible(among, job, initial_state(nodes=(0,) * workers), profile, resumes=resumes)
    chosen, rows = choose(found, among, profile, mtbf_s=mtbf_s, horizon_s=HOUR_S)
    assert [row.name for row in rows if row.chosen] == [f"redundancy {chosen.mode}"]
    return chosen, {row.name.removeprefix("redundancy "): row for row in (*rows, *without)}


def test_a_job_with_nothing_to_lose_twice_gets_shadows():
    chosen, rows = weigh(6 * HOUR_S)
    assert chosen.mode == "state"
    assert "100% of failures cost 300 s" in rows["off"].reason
    assert rows["state"].score > rows["off"].score


def test_where_failures_are_rarer_than_shadows_are_dear_there_are_none():
    assert weigh(6 * HOUR_S, gradients_s=0.5)[0].mode == "off"
    assert weigh(600.0, gradients_s=0.5)[0].mode != "off", "ten minutes between failures pay for them"


def test_forwards_are_run_ahead_where_steps_are_often_cut_off():
    chosen, rows = weigh(300.0)
    assert chosen.mode == "compute"
    assert "forwards run ahead" in rows["compute"].reason
    assert weigh(100 * HOUR_S)[0].mode == "state", "rarely cut off: not worth a more complex plan"


def test_with_data_parallelism_there_is_no_difference_yet():
    chosen, rows = weigh(6 * HOUR_S, stages=2)
    assert chosen.mode == "state"
    assert rows["off"].step_s == rows["state"].step_s
    assert rows["off"].score == pytest.approx(rows["state"].score)


def test_what_does_not_fit_is_not_chosen():
    state_bytes = 4 * 2  # of the fullest stage alone
    chosen, rows = weigh(600.0, memory_bytes=state_bytes + 8)
    assert chosen.mode == "off"
    assert "bytes" in rows["state"].reason
    with pytest.raises(PlanInfeasible):
        weigh(600.0, among=("compute",), memory_bytes=state_bytes + 8)


def test_compute_is_of_no_use_to_a_step_that_is_done_again():
    chosen, rows = weigh(300.0, resumes=False)
    assert chosen.mode == "state"
    assert rows["compute"].reason == "needs --odyssey-interrupted-step resume"


@pytest.mark.parametrize(("asked", "holders"), [("off", 1), ("state", 2), ("compute", 2), ("auto", 1)])
def test_a_job_that_seems_not_to_fit_gets_what_it_asked_for_and_nothing_more(asked, holders):
    """The estimate may be wrong; but then nobody knows whether there is room to run anything ahead."""
    config = OdysseyConfig(redundancy=asked)
    planner = PolicyPlanner(config)
    job = replace(JOB, least_holders=config.least_holders, eager_forwards=config.eager_forwards)
    profile = Profile(costs=replace(uniform_costs(8, ends=True), memory_bytes=4))
    plan = planner.start(job, initial_state(nodes=(0,) * 4), to_json(profile)).plan
    assert {len(one) for one in plan.layout.holders} == {holders}
    assert plan.ahead == ""


def test_what_was_asked_for_is_only_compared():
    chosen, rows = weigh(100 * HOUR_S, among=("compute",), gradients_s=0.5)
    assert chosen.mode == "compute"
    assert chosen.job.eager_forwards
    assert set(rows) == {"off", "compute"}
    assert rows["off"].score > rows["compute"].score
