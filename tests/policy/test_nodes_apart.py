"""A job that wants replicas on different nodes has them there after a loss, too, or its table says what that risks."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.redundancy import with_keepers
from odyssey_megatron.plan.placing.spread import apart, on_one_node
from odyssey_megatron.policy import case
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.score import NODE_SHARE
from tests.plan.samples import preset_profile

PROFILE = preset_profile("llama2-7b", "h100")
JOB = JobSpec(
    num_layers=34,
    pipeline_model_parallel_size=8,
    tensor_model_parallel_size=1,
    num_microbatches=32,
    tokens_per_step=4096,
    train_steps=10,
    spreads_replicas=True,
)
NODES = (0,) * 8 + (1,) * 8


def decided(dead: int, among: Collection[str] | None = None, **of_job: object):
    state, job = initial_state(nodes=NODES), replace(JOB, **of_job)
    plan = initial_plan(job, state, PROFILE)
    assert bool(on_one_node(plan.layout, state.nodes)) is not job.spreads_replicas
    state = apply(state, RankDied(rank=dead, code=-9, cause="killed", t_s=0.0))
    config = OdysseyConfig()
    return decide(
        job=job, state=state, previous=plan, profile=PROFILE, config=config, now_s=100.0, among=among
    )


@pytest.mark.parametrize("many", [256, 8])
@pytest.mark.parametrize("dead", [0, 3, 5, 12])
def test_behind_any_loss_any_node_may_be_lost(dead, many, monkeypatch):
    """Also in large jobs, where few shapes are looked at."""
    monkeypatch.setattr(case, "MANY_WORKERS", many)
    decision = decided(dead)
    assert decision.best.option.policy.name in ("replan", "slide"), "layers have moved"
    assert not on_one_node(decision.best.layout, decision.case.nodes)
    assert decision.best.option.fatal_share == 0.0


def test_where_it_cannot_be_the_risk_is_in_the_table():
    """Of three holders two are on one of two nodes, and of three slices with two owners each one is there alone."""
    decision = decided(0, {"replan"}, optimizer_copies=2, pipeline_model_parallel_size=4)
    assert len(decision.best.layout.holders[5]) == 3
    assert on_one_node(decision.best.layout, decision.case.nodes)
    assert decision.best.option.fatal_share == pytest.approx(NODE_SHARE / 2)
    assert "10% of losses end the job" in decision.candidates[0].reason


def test_who_has_not_asked_for_it_pays_nothing_for_it():
    """Sums stay within nodes, where Megatron has put them."""
    decision = decided(3, {"replan"}, spreads_replicas=False)
    assert on_one_node(decision.best.layout, decision.case.nodes)
    assert decision.best.option.fatal_share == 0.0
    assert not any("different nodes" in row.reason for row in decision.candidates)


@pytest.mark.parametrize("seed", range(40))
def test_pairs_that_change_places(seed):
    """Layouts of unlike pipelines, nodes of unlike sizes, one worker of another sort."""
    draw = random.Random(seed)
    layers, workers, routes = 12, 0, []
    for _ in range(draw.choice([2, 2, 3, 4])):
        stages = draw.randint(1, 6)
        ends = (*sorted(draw.sample(range(1, layers), stages - 1)), layers)
        routes.append(pipeline_route(tuple(range(workers, workers + stages)), ends, (len(routes),)))
        workers += stages
    nodes = {worker: draw.randrange(draw.choice([2, 3])) for worker in range(workers)}
    layout, copies = layout_from_routes(layers, tuple(routes)), draw.choice([0, 2])
    odd = draw.randrange(workers)
    found = apart(layout, layout, nodes, copies, lambda worker: worker == odd).check()

    def lost(one) -> int:
        return sum(map(len, on_one_node(with_keepers(one, None, nodes, copies), nodes).values()))

    assert lost(found) <= lost(layout)
    assert found.held_by(odd) == layout.held_by(odd)
    assert sorted(map(found.held_by, range(workers))) == sorted(map(layout.held_by, range(workers)))
    assert apart(found, layout, nodes, copies, lambda worker: worker == odd) is found, (
        "nothing is left to win"
    )
