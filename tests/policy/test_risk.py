"""A layout whose next loss ends the job pays for it, and the table says what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.policy.costs.measured import Measured
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.reasons import lost_to
from odyssey_megatron.policy.score import START_S, restart_cost_s
from odyssey_megatron.policy.table import candidates_table
from tests.plan.samples import preset_profile

PROFILE = preset_profile("llama2-7b", "a100")
PROFILE = replace(PROFILE, costs=replace(PROFILE.costs, link_bytes_per_s=1e10))
"""Where sums are dear: one pipeline has none."""
JOB = JobSpec(
    num_layers=34,
    pipeline_model_parallel_size=8,
    tensor_model_parallel_size=1,
    num_microbatches=32,
    tokens_per_step=32 * 4096,
    train_steps=1000,
    save_steps=100,
)
CONFIG = OdysseyConfig(mtbf_s=86_400.0)
START = initial_state(nodes=(0,) * 32)
ALIVE = (0, 1, 4, 7, 10, 11, 12, 13, 14, 16, 18, 21, 22, 24, 26, 28, 31)


def struck(t_s=0.0, alive=ALIVE):
    state = START
    for rank in sorted(set(range(32)) - set(alive)):
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=t_s))
    return state


def decided(config=CONFIG, alive=ALIVE, **profile):
    costs = replace(PROFILE, **profile)
    plan = initial_plan(JOB, START, costs)
    return decide(job=JOB, state=struck(alive=alive), previous=plan, profile=costs, config=config, now_s=0.0)


def test_a_single_pipeline_is_left_to_those_who_can_afford_a_restart():
    cheap, dear = decided(restart_s=10.0), decided(restart_s=3600.0)
    assert len(cheap.best.layout.routes) == 1
    assert len(dear.best.layout.routes) > 1
    assert cheap.best.step_s < dear.best.step_s
    row = cheap.candidates[0]
    assert row.next_loss > 0
    assert "100% of losses end the job (10 s, then " in row.reason
    assert f"-{row.next_loss:,.0f}" in candidates_table(cheap.candidates).splitlines()[1]
    assert dear.candidates[0].next_loss == 0.0


def test_with_redundancy_auto_a_single_pipeline_may_have_shadows():
    """Where a restart is dear: the next loss is survived. Where it is cheap they cost more than they save.

    With so little memory that more pipelines would be much slower.
    """
    config, costs = replace(CONFIG, redundancy="auto"), replace(PROFILE.costs, memory_bytes=31 * 2**30)
    cheap, dear = (decided(config, costs=costs, restart_s=restart_s) for restart_s in (10.0, 7200.0))
    assert cheap.best.option.note == "pipelines 17"
    assert dear.best.option.note == "pipelines 17, with new shadows"
    assert min(map(len, dear.best.layout.holders)) == 2
    assert dear.candidates[0].next_loss == 0.0
    verify(dear.best.layout, dear.plan.schedule)


def test_a_score_below_zero_is_no_share_of_another():
    """It said 124.4% fewer tokens."""
    chosen = decided().best
    assert lost_to(replace(chosen, score=-0.244 * chosen.score), chosen).endswith(
        f"score {-0.244 * chosen.score:,.0f}"
    )
    assert lost_to(replace(chosen, score=0.9 * chosen.score), chosen).endswith("10.0% fewer tokens")


@pytest.mark.parametrize(("alive", "risky"), [(ALIVE, ["replan"]), (ALIVE[::2], ["restart"])])
def test_what_the_next_loss_costs_is_what_the_score_lacks(alive, risky):
    """A restart with nine of 32 workers has a single pipeline of eight."""
    found = decided(restart_s=10.0, alive=alive)
    rows = [row for row in found.candidates if row.next_loss]
    assert {row.name for row in rows} >= set(risky)
    for row in rows:
        assert "of losses end the job (10 s, then " in row.reason
        assert row.score + row.next_loss == pytest.approx(found.case.score(row.step_s, row.transition_s))


def test_half_of_what_lies_between_two_checkpoints_is_lost_or_all():
    assert restart_cost_s(250.0, 100, 6.0, 5000.0) == 250.0 + 300.0
    assert restart_cost_s(2.0, 100, 6.0, 5000.0) == START_S + 300.0
    assert restart_cost_s(250.0, 100, 6.0, 50.0) == 250.0 + 50.0, "nothing has been saved yet"
    assert restart_cost_s(250.0, 0, 6.0, 5000.0) == 250.0 + 5000.0, "nothing ever is"
    assert restart_cost_s(250.0, 0, 6.0, 5000.0, given_s=40.0) == 40.0


@pytest.mark.parametrize(
    ("given_s", "measures", "save_steps", "expected_s"),
    [(0.0, True, 100, 400.0), (0.0, False, 100, 300.0), (0.0, True, None, 300.0), (77.0, False, None, 77.0)],
)
def test_a_running_job_knows_what_its_restart_costs(given_s, measures, save_steps, expected_s):
    """It trained 400 s after it began, less the five steps that were measured; half of 100 steps of 2 s is lost."""
    planner = PolicyPlanner(OdysseyConfig(restart_s=given_s))
    job = replace(JOB, save_steps=save_steps)
    plan = replace(planner.start(job, START, to_json(PROFILE)).plan, step_s=2.0)
    planner.learn(START, plan, [to_json(Measured()) if measures else ""] * 32, 310.0)
    priced = planner._priced(PROFILE, START, 2.0, 5000.0)
    assert priced.restart_s == expected_s
