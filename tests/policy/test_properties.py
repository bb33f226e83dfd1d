"""Random clusters, models and failures: every plan stands, and auto is never below a single policy.

The suite tries the same few hundred decisions each time. With ODYSSEY_SLOW_TESTS=1 it tries 10,000 jobs, others each
time; a failure is shrunk to a small one, and printed with the line that repeats it.
"""

import math
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey_megatron.cluster.events import RankDied, RankJoined
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state, with_slow_links
from odyssey_megatron.config import OdysseyConfig, policies
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.checking.units import check_state
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.placing.memory import state_bytes
from odyssey_megatron.policy.case import in_cluster, worker_shares
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.shapes.pipelines import ALIKE
from tests.plan.second import Second, held_bytes

SLOW = "ODYSSEY_SLOW_TESTS" in os.environ

tenths = st.integers(2, 20).map(lambda n: n / 10)


@st.composite
def layers(draw, scales=(1.0,)):
    scale = draw(st.sampled_from(scales))
    return LayerCost(
        forward_s=scale * draw(tenths),
        input_grad_s=scale * draw(tenths),
        weight_grad_s=scale * draw(tenths),
        activation_bytes=draw(st.integers(0, 40)),
        weight_bytes=draw(st.integers(1, 20)),
        gradient_bytes=draw(st.integers(1, 20)),
        optimizer_bytes=draw(st.integers(1, 60)),
        state_bytes=draw(st.integers(1, 80)),
    )


def weight_alone(layer):
    """What embedding and head share: nothing computes it."""
    return replace(layer, forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0, activation_bytes=0)


@st.composite
def costs_of(draw, blocks):
    middle = draw(
        st.one_of(
            layers().map(lambda one: [one] * blocks), st.lists(layers(), min_size=blocks, max_size=blocks)
        )
    )
    tied = draw(st.none() | layers().map(weight_alone))
    return Costs(
        layers=(draw(layers((0.01, 1.0))), *middle, draw(layers((0.1, 2.0)))),
        tied=tied,
        message_bytes=draw(st.integers(0, 10)),
        link_latency_s=draw(st.sampled_from((0.0, 0.01, 0.3))),
        link_bytes_per_s=draw(st.sampled_from((1e4, 1e2))),
        agreement_s=draw(st.sampled_from((0.0, 0.5))),
        optimizer_s_per_byte=draw(st.sampled_from((0.0, 0.001, 0.1))),
    )


@st.composite
def jobs(draw):
    """(job, profile, state, config) of a healthy cluster, perhaps with a slow worker, or slow links."""
    pp, dp = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    blocks = draw(st.integers(pp, 3 * pp))
    profile = Profile(costs=draw(costs_of(blocks)), group_build_s=draw(st.sampled_from((0.0, 0.1, 5.0))))
    job = JobSpec(
        num_layers=2 + blocks,
        is_tied=profile.costs.tied is not None,
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=1,
        num_microbatches=dp * draw(st.integers(1, 4)),
        tokens_per_step=1000,
        train_steps=10,
        revisits=draw(st.booleans()),
        virtual_stages=draw(st.sampled_from((1, 1, 2))),
        spreads_replicas=draw(st.booleans()),
    )
    state = initial_state(nodes=tuple(i // 4 for i in range(pp * dp)))
    slow = draw(st.none() | st.tuples(st.sampled_from(state.ranks), st.sampled_from((0.7, 0.3))))
    if slow:
        workers = (replace(w, speed=slow[1]) if w.worker == slow[0] else w for w in state.workers)
        state = replace(state, workers=tuple(workers))
    if pp > 1 and draw(st.booleans()):
        ends = st.sampled_from(state.ranks)
        longer_s = draw(st.sampled_from((0.01, 1.0, 20.0)))
        links = draw(st.lists(st.tuples(ends, ends).filter(lambda link: link[0] != link[1]), max_size=6))
        state = with_slow_links(state, dict.fromkeys(links, longer_s))
    config = OdysseyConfig(
        horizon_s=draw(st.sampled_from((3600.0, 10.0))), mtbf_s=draw(st.sampled_from((86400.0, 60.0)))
    )
    return job, profile, state, config


def check_plan(plan, job, profile, state):
    layout = plan.layout.check()
    assert (layout.num_layers, layout.tied) == (job.num_layers, job.is_tied)
    assert layout.num_microbatches == job.num_microbatches
    assert set(layout.workers) <= set(state.alive)
    speeds = {w.worker: w.pace for w in state.workers}
    timeline = verify(layout, plan.schedule, in_cluster(profile, state).costs, speeds=speeds)
    assert timeline.step_s == pytest.approx(plan.step_s, rel=1e-6)
    second = Second(plan.schedule.to_text(), in_cluster(profile, state).costs, speeds, layout.copies)
    assert second.step_s == pytest.approx(plan.step_s, rel=1e-8)
    held = held_bytes(layout, profile.costs)
    peaks = second.peak_bytes(held)
    assert dict(timeline.peak_bytes) == peaks
    for worker, own in worker_shares(state).items():
        if worker in peaks:
            others = peaks[worker] - held[worker]
            peaks[worker] = math.ceil((others + math.ceil(held[worker] * own.state)) / own.ranks)
    assert dict(plan.peak_bytes) == peaks
    assert plan.bound_s <= plan.step_s * (1 + 1e-12)
    if profile.costs.memory_bytes is not None:
        assert max(dict(plan.peak_bytes).values()) <= profile.costs.memory_bytes


def limited(profile, plan, spare):
    """``profile`` with just enough memory for ``plan``, and a share of the fullest worker's state more."""
    fullest = max(state_bytes(plan.layout, profile.costs).values())
    room = max(dict(plan.peak_bytes).values()) + round(spare * fullest)
    return replace(profile, costs=replace(profile.costs, memory_bytes=room))


@settings(
    max_examples=10_000 if SLOW else 100,
    derandomize=not SLOW,
    database=None,
    print_blob=True,
)
@given(data=st.data(), of=jobs())
@pytest.mark.timeout(3600 if SLOW else 120)
def test_up_to_three_failures_in_a_row(data, of):
    job, profile, state, config = of
    plan = initial_plan(job, state, profile)
    check_plan(plan, job, profile, state)
    spare = data.draw(st.none() | tenths, label="memory to spare")
    if spare is not None:
        profile = limited(profile, plan, spare)
    lost = ()
    for _ in range(3):
        if len(state.alive) < 2:
            break
        most = min(len(state.alive) - 1, 3)
        for victim in data.draw(
            st.sets(st.sampled_from(state.alive), min_size=1, max_size=most), label="killed"
        ):
            state = apply(state, RankDied(rank=victim, code=-9, cause="killed", t_s=5.0))
        arguments = {"job": job, "state": state, "previous": plan, "profile": profile, "now_s": 50.0}
        try:
            decision = decide(**arguments, config=config)
        except LayersLost as error:
            lost = error.layers
            break
        except PlanInfeasible:
            assert profile.costs.memory_bytes is not None, "infeasible without a memory limit"
            return
        chosen = decision.candidates[0]
        assert chosen.chosen
        for policy in policies()[1:]:
            forced = decide(**arguments, config=replace(config, policy=policy))
            # A shape that could at best be a thousandth better than another one is not scheduled.
            assert chosen.score >= forced.candidates[0].score - ALIKE * abs(chosen.score)
        check_state(plan.layout, decision.plan.layout, decision.plan.transfers, state.alive)
        plan = decision.plan
        assert decision.bound_s <= plan.bound_s * (1 + 1e-6)
        check_plan(plan, job, profile, state)
    assert all(set(plan.layout.all_holders[layer]) <= set(state.dead) for layer in lost)


@st.composite
def jobs_of_cells(draw):
    """:func:`jobs` of four ranks a worker, which may cut optimizer state, want shadows, and keep messages."""
    job, profile, state, config = draw(jobs())
    size, kind = (
        4,
        draw(st.sampled_from(({}, {"context": 2}, {"context": 4}, {"experts": 2, "experts_work": 0.5}))),
    )
    cells = initial_state(
        nodes=tuple(i // 16 for i in range(size * len(state.workers))), cell_size=size, **kind
    )
    early = draw(st.sampled_from((0, 1, -6)))
    costs = profile.costs
    costs = costs.with_layers(
        replace(one, early_bytes=early * one.activation_bytes // 3) for one in costs.all_layers
    )
    costs = replace(
        costs, keeps_messages=draw(st.booleans()), bucket_bytes=draw(st.sampled_from((None, 1, 60)))
    )
    job = replace(
        job,
        optimizer_copies=draw(st.sampled_from((0, 2, 3))),
        least_holders=draw(st.sampled_from((0, 0, 2, 3))),
    )
    return job, replace(profile, costs=costs), cells, config


@settings(max_examples=1000 if SLOW else 40, derandomize=not SLOW, database=None, print_blob=True)
@given(data=st.data(), of=jobs_of_cells())
@pytest.mark.timeout(3600 if SLOW else 120)
def test_cells_die_and_come_back_smaller(data, of):
    job, profile, state, config = of
    plan = home = initial_plan(job, state, profile)
    check_plan(plan, job, profile, state)
    spare = data.draw(st.none() | tenths, label="memory to spare")
    if spare is not None:
        profile = limited(profile, plan, spare)
    for change in range(data.draw(st.integers(2, 4), label="changes")):
        if state.dead and (change == 1 or data.draw(st.booleans(), label="comes back")):
            size = data.draw(st.sampled_from((2, 1, 0, 3)), label="ranks")
            if size == 3 and not state.workers[0].experts:
                size = 0  # only a gang may be uneven
            back = state.workers[state.dead[0]].whole.smaller(size)
            for rank in back.ranks:
                process = state.incarnation_of(rank) + 1
                state = apply(state, RankJoined(rank=rank, node=back.node, incarnation=process, size=size))
        elif len(state.alive) > 1:
            victim = state.workers[data.draw(st.sampled_from(state.alive), label="killed")].ranks[0]
            process = state.incarnation_of(victim)
            state = apply(state, RankDied(rank=victim, code=-9, cause="killed", incarnation=process))
        before = plan
        try:
            plan = decide(
                job=job,
                state=state,
                previous=plan,
                profile=profile,
                config=config,
                now_s=50.0,
                home=home.layout,
            ).plan
        except LayersLost:
            return
        except PlanInfeasible:
            assert profile.costs.memory_bytes is not None, "infeasible without a memory limit"
            return
        check_plan(plan, job, profile, state)
        check_state(before.layout, plan.layout, plan.transfers, {*state.alive} - state.fresh)
        state = replace(state, fresh=frozenset())
