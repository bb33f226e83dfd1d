"""What holds for every policy, by itself: the registry has them all."""

import random
from dataclasses import replace
from itertools import islice

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import initial_state, with_slow_links, with_speeds
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.policy.case import Case, in_cluster
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.policies import POLICIES, mix
from odyssey_megatron.policy.proposal import Sketch
from odyssey_megatron.policy.routes.mixing import Mixing
from tests.plan.samples import uniform_costs


def random_case(rng: random.Random) -> Case:
    """A job that has lost workers, or has some back, or neither; perhaps with slow ones, or slow links, among
    the rest."""
    stages, pipelines = rng.randint(1, 4), rng.randint(1, 4)
    layers, microbatches = 2 + rng.choice((2, 2, 4)) * stages, rng.choice((2, 2, 3, 4)) * pipelines
    job = JobSpec(
        num_layers=layers, pipeline_model_parallel_size=stages, tensor_model_parallel_size=1,
        num_microbatches=microbatches, tokens_per_step=1000, train_steps=10, revisits=rng.random() < 0.5,
    )  # fmt: skip
    home = megatron_layout(
        num_layers=layers,
        pipeline_size=stages,
        num_workers=stages * pipelines,
        num_microbatches=microbatches,
    )
    state = initial_state(nodes=(0,) * (stages * pipelines))
    dead = rng.sample(state.alive, rng.randint(0, (len(state.alive) - 1) // 2))
    slow = rng.sample(state.alive, rng.choice((0, 0, 1)))
    workers = [
        replace(w, alive=w.worker not in dead, speed=0.5 if w.worker in slow else 1.0) for w in state.workers
    ]
    previous = home
    if pipelines > 1 and rng.random() < 0.4:  # planned for fewer, and the dead of then are back
        workers = [replace(w, alive=True) for w in workers]
        previous = megatron_layout(
            num_layers=layers,
            pipeline_size=stages,
            num_workers=stages * (pipelines - 1),
            num_microbatches=microbatches,
        )
    state = replace(state, workers=tuple(workers))
    if len(previous.routes[0].hops) > 1 and rng.random() < 0.3:
        one, other = rng.choice(previous.routes).hops[:2]
        state = with_slow_links(state, {(one.worker, other.worker): 5.0})
    return Case(
        job=job,
        state=state,
        previous=previous,
        home=home,
        usual_step_s=1.0,
        profile=in_cluster(Profile(costs=uniform_costs(layers - 2, ends=True)), state),
        horizon_s=3600.0,
        mtbf_s=86400.0,
        rebalances=not dead and rng.random() < 0.5,
    )


@pytest.mark.parametrize("policy", POLICIES, ids=lambda one: one.name)
def test_what_is_proposed_can_be_had(policy):
    rng, proposed = random.Random(0), 0
    for _ in range(400):
        case = random_case(rng)
        try:
            found = list(islice(policy.propose(case), 4))
        except PlanInfeasible:
            continue
        for one in found:
            try:
                layout = one.make() if isinstance(one, Sketch) else one.layout
            except PlanInfeasible:
                continue
            assert layout.check().num_microbatches == case.job.num_microbatches
            assert layout.num_layers == case.job.num_layers
            assert set(layout.workers) <= set(case.state.alive)
            assert one.note
            proposed += 1
        if policy.name == "mix" and proposed >= 5:
            break  # each is a search of a second
    assert proposed >= 5, "too few clusters in which it applies"


def test_routes_taken_apart_are_judged_with_shadows_among_the_living():
    state = initial_state(nodes=(0, 1, 2))
    workers = tuple(replace(one, alive=one.worker != 1) for one in state.workers)
    case = replace(random_case(random.Random(0)), state=replace(state, workers=workers), rebalances=True)
    alone = megatron_layout(num_layers=4, pipeline_size=1, num_workers=1, num_microbatches=2)
    case = replace(
        case,
        job=replace(case.job, num_layers=4, least_holders=2),
        previous=alone,
        profile=Profile(costs=uniform_costs(2, ends=True)),
    )
    assert mix._kept(case, alone).workers == (0, 2)


@pytest.mark.parametrize("rebalance", ["auto", "off"])
def test_a_job_that_only_tells_is_not_deaf_for_what_takes_long(monkeypatch, rebalance):
    asked = []
    monkeypatch.setattr(Mixing, "better", lambda *args: asked.append(args))
    state, profile = initial_state(nodes=(0, 0)), Profile(costs=uniform_costs(3, ends=True))
    job = JobSpec(
        num_layers=5, pipeline_model_parallel_size=2, tensor_model_parallel_size=1,
        num_microbatches=2, tokens_per_step=1, train_steps=1,
    )  # fmt: skip
    before = initial_plan(job, state, profile)
    config = OdysseyConfig(mtbf_s=1e9, rebalance=rebalance)
    slow = with_speeds(state, {0: 0.5})
    decide(job=job, state=slow, previous=before, profile=profile, config=config, now_s=0.0, rebalances=True)
    assert bool(asked) == (rebalance == "auto")


def test_each_is_found_by_the_name_of_its_file():
    assert [type(one).__module__.rpartition(".")[2] for one in POLICIES] == [one.name for one in POLICIES]
