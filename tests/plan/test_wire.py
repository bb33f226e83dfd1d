"""A generation as it is sent: each worker reads its own part, and together they are the whole plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import initial_state
from odyssey_megatron.codec import from_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.layout import Hop, Layout, Route
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.plan.scheduling.programs import Programs
from odyssey_megatron.plan.scheduling.resume import BEGINS, fits
from odyssey_megatron.plan.sending.generation import Generation
from odyssey_megatron.plan.sending.wire import (
    NO_PART,
    NO_PROGRAM,
    Head,
    WorkerPart,
    from_wire,
    has_part,
    to_wire,
    with_all_routes,
)
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from tests.plan.samples import uniform_costs

WORKERS, DEAD = 12, {1, 6}


def planned(policy, copies=0, *, tied=False):
    """(the plan before, the plan after two losses) of three pipelines of four."""
    job = JobSpec(
        num_layers=18,
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=1,
        num_microbatches=12,
        tokens_per_step=12,
        train_steps=1,
        optimizer_copies=copies,
        is_tied=tied,
    )
    state = initial_state(nodes=(0,) * WORKERS)
    costs = uniform_costs(18)
    profile = Profile(costs=replace(costs, tied=costs.layers[0] if tied else None), restart_s=100.0)
    before = initial_plan(job, state, profile)
    workers = tuple(replace(one, alive=one.worker not in DEAD) for one in state.workers)
    state = replace(state, workers=workers, failure_times_s=(1.0,))
    config = OdysseyConfig(policy=policy)
    found = decide(job=job, state=state, previous=before, profile=profile, config=config, now_s=2.0)
    return before, found.plan


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("policy", ["reroute", "replan"])
def test_parts_are_the_whole(policy, copies, tied):
    before, plan = planned(policy, copies, tied=tied)
    assert plan.policy == policy
    generation = Generation(
        number=7,
        members=tuple(range(WORKERS)),
        dead=tuple(DEAD),
        why="failure",
        previous=before.layout,
        plan=plan,
        plan_hash=plan.hash(),
        incarnations=((3, 2),),
        fresh=(11,),
        timed=((0, 3), (4, 2)),
        decide_s=0.5,
    )
    sent = to_wire(generation, 1)
    head = from_json(Head, sent.head)
    assert set(sent.parts) == {worker for worker in range(WORKERS) if has_part(head.shape, worker)}
    assert set(sent.parts) == {*plan.layout.workers, *(one.source for one in plan.transfers)}
    for worker, text in sent.parts.items():
        part = from_json(WorkerPart, text)
        template = "" if part.template == NO_PROGRAM else sent.templates[part.template]
        found = from_wire(head, worker, part, template)
        assert replace(found, plan=plan, previous=None) == replace(generation, previous=None)
        own = found.plan
        assert own.program(worker) == plan.program(worker)
        assert own.layout.blocks() == plan.layout.blocks()
        assert own.layout.num_microbatches == plan.layout.num_microbatches == 12
        assert (own.layout.states, own.layout.workers) == (plan.layout.states, plan.layout.workers)
        assert own.layout.spare_states(worker) == plan.layout.spare_states(worker)
        assert found.previous.held_by(worker) == before.layout.held_by(worker)
        assert own.transfers == tuple(one for one in plan.transfers if worker in (one.source, one.target))
        assert own.layout.routes == tuple(
            replace(route, hops=tuple(hop for hop in route.hops if hop.worker == worker))
            for route in plan.layout.routes
            if any(hop.worker == worker for hop in route.hops)
        )
        whole = with_all_routes(own.layout, sent.routes)
        assert (whole.routes, whole.num_microbatches) == (plan.layout.routes, 12)
    assert len(sent.templates) <= len(plan.layout.workers)


def test_a_worker_that_holds_nothing_any_more_sends_what_it_had():
    before, plan = planned("replan")
    moved = (*(Transfer(layer=layer, source=WORKERS, target=0) for layer in (3, 4, 5, 9)),)
    plan = replace(plan, transfers=(*moved[:2], Transfer(layer=0, source=2, target=3), *moved[2:]))
    generation = Generation(
        number=1,
        members=(0,),
        dead=(),
        why="failure",
        previous=before.layout,
        plan=plan,
        plan_hash=plan.hash(),
    )
    sent = to_wire(generation, 1)
    head = from_json(Head, sent.head)
    assert has_part(head.shape, WORKERS)
    found = from_wire(head, WORKERS, from_json(WorkerPart, sent.parts[WORKERS])).plan
    assert (found.program(WORKERS), found.transfers) == ((), moved)
    assert from_wire(head, 0, from_json(WorkerPart, sent.parts[0]), sent.templates[0]).plan.transfers == moved


def test_a_worker_that_holds_nothing():
    _, plan = planned("replan")
    generation = Generation(
        number=1, members=(0,), dead=(), why="start", previous=None, plan=plan, plan_hash=plan.hash()
    )
    found = from_wire(from_json(Head, to_wire(generation, 1).head), 1, NO_PART)
    assert found.previous is None
    assert (found.plan.program(1), found.plan.layout.held_by(1)) == ((), ())


def test_equal_pipelines_have_one_program():
    plan, _ = planned("reroute")
    assert len(plan.programs.templates) == 4, "one a stage"
    assert plan.programs.of(0) != plan.programs.of(2)


def test_a_worker_that_is_visited_twice():
    """As where the last of a pipeline takes the first one's place, too."""
    hops = tuple(Hop(worker=worker, first=at, last=at + 1) for at, worker in enumerate((2, 1, 2)))
    layout = Layout(holders=((2,), (1,), (2,)), routes=(Route(microbatches=(0,), hops=hops),))
    _, plan = planned("replan")
    plan = replace(plan, layout=layout, transfers=(), programs=Programs.from_text("1: STEP\n2: STEP"))
    generation = Generation(
        number=1, members=(1, 2), dead=(), why="start", previous=None, plan=plan, plan_hash=plan.hash()
    )
    sent = to_wire(generation, 1)
    found = from_wire(from_json(Head, sent.head), 2, from_json(WorkerPart, sent.parts[2]), "STEP").plan.layout
    row = [BEGINS + 1, 0, BEGINS + 1]
    assert fits(found, 2, {0: row})
    assert not fits(found, 1, {0: row})
