"""Pipelines of any lengths: beside every partition there is, and beside fewer workers."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import Share, apply, initial_state, with_slow_links
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.placing.memory import fullest_bytes
from odyssey_megatron.policy.case import Case, in_cluster
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide, scheduled
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.policies import replan
from odyssey_megatron.policy.preparing import prepare_for
from odyssey_megatron.policy.routes.links import around
from odyssey_megatron.policy.shapes import partition
from odyssey_megatron.policy.shapes.kinds import Slow, stages_of
from odyssey_megatron.policy.shapes.pipelines import ALIKE, Pipelines
from odyssey_megatron.policy.shapes.search import Search
from tests.benchmarks.policies import LAYERS, costs
from tests.plan.samples import layer, preset_profile, uniform_costs


def preset(model, accelerator, pp, microbatches, tight, workers=32):
    """(search, microbatches of all pipelines), with ``tight`` times the memory that 1F1B's fullest worker needs."""
    found = replace(preset_profile(model, accelerator).costs, keeps_messages=True)
    count = workers // pp * microbatches
    layout = megatron_layout(
        num_layers=len(found.layers), pipeline_size=pp, num_workers=workers, num_microbatches=count
    )
    found = replace(found, memory_bytes=int(tight * fullest_bytes(layout, found)))
    return Search(found, found.memory_bytes), count


def partitions(workers, most):
    """All multisets of lengths, of all the workers or fewer."""
    if workers == 0 or most == 0:
        yield ()
        return
    yield from partitions(workers, most - 1)
    if most <= workers:
        for rest in partitions(workers - most, most):
            yield (most, *rest)


@pytest.mark.parametrize("slow", [(), (Slow(0.5),), (Slow(0.5, Share(0.5)), Slow(0.8))])
@pytest.mark.parametrize(
    ("memory", "workers", "copies"), [(22, 9, 2), (26, 14, 0), (40, 12, 2), (1000, 9, 2)]
)
def test_lengths_that_leave_too_few_workers_for_the_others_change_nothing(
    memory, workers, copies, slow, monkeypatch
):
    costs = uniform_costs(12, ends=True, message_s=0.1)
    found = Search(costs, memory, copies).partitions(workers, 2 * workers, slow)
    reach = Pipelines.reach
    monkeypatch.setattr(Pipelines, "reach", lambda pipelines, _: reach(pipelines, 1))
    assert found == Search(costs, memory, copies).partitions(workers, 2 * workers, slow)
    assert any(one.shares for one in found)


def test_what_pipelines_can_do_does_not_depend_on_the_lengths_that_were_looked_at_before():
    """Long ones have the best rate here, but seven pipelines of 13 workers cannot have them."""
    found = []
    for first in (1, 7):
        search = Search(uniform_costs(8, ends=True, message_s=0.1), 26)
        own = search.pipelines(13, search.splits.sorts.numbers([Slow(0.5)]), 26)
        own.reach(first)
        own.count(7, 8192, 1.0)
        found.append([own.any(float(time_s)) for time_s in range(60, 200, 4)])
    assert found[0] == found[1]
    assert any(found[0])


@pytest.mark.parametrize(("memory", "workers"), [(17, 5), (22, 6), (40, 6), (1000, 7)])
def test_hardly_any_partition_is_better(memory, workers):
    """Every partition of the workers, with every way to share out the microbatches, scheduled."""
    microbatches = 8
    found = uniform_costs(8, ends=True, message_s=0.1)
    search = Search(found, memory)
    own = Pipelines(search.splits, workers, (), microbatches)
    own.reach(1)
    ways = itertools.chain.from_iterable(
        (
            tuple(zip(lengths, shares, strict=True))
            for shares in itertools.product(range(1, microbatches + 1), repeat=len(lengths))
            if sum(shares) == microbatches
        )
        for lengths in set(partitions(workers, workers))
        if 0 < len(lengths) <= 4 and set(lengths) <= set(own.lengths)
    )
    best = min(max(own.schedule(*one) for one in way) for way in ways)
    shares = partition.ranked(search, workers, microbatches)[0].shares
    assert max(own.schedule(*one) for one in shares) <= best * 1.01, "the estimate has the sums in it, too"


@pytest.mark.parametrize(
    ("setting", "alive", "lengths", "step_s"),
    [
        ((2, 16, 32, 4), 31, (16, 8, 7), 244.0),
        ((2, 16, 32, 4), 28, (16, 12), 264.0),
        ((4, 8, 32, 4), 30, (8, 8, 8, 6), 448.0),
    ],
)
def test_lengths_that_differ_much(setting, alive, lengths, step_s):
    """With lengths that differ by one at most these take 260, 278 and 460."""
    dp, pp, microbatches, state = setting
    found = costs(LAYERS // pp * (pp + state), state)
    best = partition.ranked(Search(found, found.memory_bytes), alive, dp * microbatches)[0]
    assert (tuple(stages for stages, _ in best.shares), best.estimate_s) == (lengths, step_s)
    assert sum(count for _, count in best.shares) == dp * microbatches


@pytest.mark.parametrize("tight", [1.0, 1.2])
def test_one_worker_more_is_never_slower(tight):
    search, count = preset("llama2-7b", "a100", 8, 16, tight)
    steps = [search.partitions(workers, count)[0].estimate_s for workers in (29, 30, 31, 32)]
    for fewer, more in itertools.pairwise(steps):
        assert more <= fewer * (1 + ALIKE)


def test_two_pipelines_that_fit_only_with_the_slow_worker():
    """Three workers are a single pipeline here: one alone has no room for all layers. Two have, in 5 % more memory."""
    found = preset_profile("qwen3-30b-a3b", "h100", expert_parts=8).costs
    search, uneven_gang = Search(found, found.memory_bytes * 21 // 20), Slow.of(0.6, Share(1 / 2, 19 / 32))
    (without,) = search.partitions(3, 64)
    of_two = next(one for one in search.partitions(3, 64, [uneven_gang]) if one.number == 2)
    assert without.number == 1
    assert [stages_of(kind) for kind, _ in of_two.shares] == [2, 2]
    assert of_two.estimate_s < 0.9 * without.estimate_s


def test_the_same_whatever_was_asked_before():
    search, count = preset("llama2-7b", "a100", 16, 16, 1.0)
    search.partitions(28, count)
    again, _ = preset("llama2-7b", "a100", 16, 16, 1.0)
    assert search.partitions(30, count) == again.partitions(30, count)


def test_a_healthy_job_may_start_with_the_best_layout():
    """Llama-3 8B, 32 H100, PP16: the launch line's stages are far from even, as the head is large."""
    profile = preset_profile("llama3-8b", "h100")
    job = JobSpec(
        num_layers=len(profile.costs.layers),
        pipeline_model_parallel_size=16,
        tensor_model_parallel_size=1,
        num_microbatches=64,
        tokens_per_step=1,
        train_steps=1,
    )
    state = initial_state(nodes=tuple(worker // 8 for worker in range(32)))
    own = initial_plan(job, state, profile)
    best = initial_plan(replace(job, best_layout=True), state, profile)
    assert own.step_s > 1.4 * best.step_s
    assert min(map(len, best.layout.holders)) >= 2, "one may be lost, as with the launch line's layout"


def test_the_best_layout_has_as_many_owners_of_optimizer_state_as_were_asked_for():
    """Sums between three replicas take longer than what the third one would compute; yet any two may be lost."""
    found = replace(uniform_costs(4, ends=True, state_bytes=1), link_bytes_per_s=0.5)
    job = JobSpec(
        num_layers=6, pipeline_model_parallel_size=1, tensor_model_parallel_size=1, num_microbatches=6,
        tokens_per_step=1, train_steps=1, best_layout=True,
    )  # fmt: skip
    state = initial_state(nodes=(0,) * 3)
    for copies, holders in ((0, 2), (2, 2), (3, 3)):
        plan = initial_plan(replace(job, optimizer_copies=copies), state, Profile(costs=found))
        assert min(map(len, plan.layout.holders)) == holders


def tight(layers, stages, microbatches, memory_bytes, activation_bytes, **more):
    """A job of two pipelines that memory binds, which chooses its layout; and its profile."""
    costs = uniform_costs(layers, ends=True, state_bytes=4, activation_bytes=activation_bytes)
    job = JobSpec(
        num_layers=layers + 2, pipeline_model_parallel_size=stages, tensor_model_parallel_size=1,
        num_microbatches=microbatches, tokens_per_step=1, train_steps=1, best_layout=True, **more,
    )  # fmt: skip
    return job, Profile(costs=replace(costs, memory_bytes=memory_bytes))


def test_the_best_layout_may_be_one_pipeline_with_shadows():
    """Two pipelines of two workers keep the same state, and more activations."""
    job, profile = tight(14, 2, 4, 68, 4)
    plan = initial_plan(job, initial_state(nodes=(0, 1, 2, 3)), profile)
    assert (plan.layout.lengths, min(map(len, plan.layout.holders))) == ("4", 2)
    assert plan.step_s == 63.0
    two = next(iter(Search(profile.costs, 68).partitions(4, 4)[1:]))
    assert (two.number, two.estimate_s) == (2, 68.0)


@pytest.mark.parametrize("memory_bytes", [68, 72])
def test_second_holders_stay_when_a_better_layout_is_looked_for_by_measured_costs(tmp_path, memory_bytes):
    """Without them a step would be 7 % shorter."""
    job, profile = tight(14, 2, 4, memory_bytes, 4, revisits=False)
    config = OdysseyConfig(
        run_dir=str(tmp_path), device="cpu", layout="auto", interrupted_step="redo", mtbf_s=1e9
    )
    planner, state = PolicyPlanner(config), initial_state(nodes=(0, 1, 2, 3))
    plan = planner.start(job, state, to_json(profile)).plan
    found = planner.rebalance(state, plan, 0.0, math.inf, anew=True)
    assert (found.gain, found.decided.plan.layout.losses_survived) == (0.0, plan.layout.losses_survived)
    assert plan.layout.losses_survived == 1


def test_layouts_that_turn_out_not_to_fit_do_not_count_as_tried():
    """With two copies of optimizer state three pipelines are thought to fit, which would be faster."""
    job, profile = tight(22, 3, 6, 124, 8, revisits=True)
    state = initial_state(nodes=(0,) * 6)
    plans = [initial_plan(replace(job, optimizer_copies=copies), state, profile) for copies in (0, 2)]
    assert plans[0].step_s == plans[1].step_s
    assert len(plans[1].layout.routes) == 2


def test_a_large_healthy_job_is_no_slower_than_with_a_worker_less():
    profile, config = preset_profile("llama2-7b", "h100"), OdysseyConfig(mtbf_s=1e9, horizon_s=1e6)
    job = JobSpec(
        num_layers=len(profile.costs.layers), pipeline_model_parallel_size=8, tensor_model_parallel_size=1,
        num_microbatches=136, tokens_per_step=1, train_steps=1, optimizer_copies=2, best_layout=True,
    )  # fmt: skip
    state = initial_state(nodes=tuple(worker // 8 for worker in range(136)))
    best = initial_plan(job, state, profile)
    fewer = apply(state, RankDied(rank=0, code=-9, cause="killed", t_s=0.0))
    prepare_for(135, job, profile)
    after = decide(job=job, state=fewer, previous=best, profile=profile, config=config, now_s=0.0)
    assert best.step_s <= after.best.step_s


@pytest.mark.parametrize("memory_is_known", [False, True])
def test_a_sketch_promises_no_more_than_its_layout_keeps(memory_is_known):
    """Where other pipelines leave it more memory than it would have alone, and where links are slow; but for a recovery
    that waits, which goes by estimates.
    """
    rng, shorter, more = random.Random(5), 0, 0
    for _ in range(25):
        kinds = [
            layer(rng.uniform(0.2, 2.0), rng.uniform(0.2, 2.0), rng.uniform(0.2, 2.0), 3) for _ in range(6)
        ]
        found = replace(uniform_costs(4), layers=tuple(kinds), link_latency_s=0.1, link_bytes_per_s=20.0)
        pipelines = rng.choice((3, 4))
        home = megatron_layout(
            num_layers=6, pipeline_size=3, num_workers=3 * pipelines, num_microbatches=4 * pipelines
        )
        if memory_is_known:
            found = replace(found, memory_bytes=2 * fullest_bytes(home, found))
        state = initial_state(nodes=(0,) * 3 * pipelines)
        for rank in rng.sample(range(3 * pipelines), 2):
            state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=0.0))
        if memory_is_known:
            links = {(one, other): 0.3 for one in state.alive[:2] for other in state.alive if other != one}
            state = with_slow_links(state, links)
        case = Case(
            job=JobSpec(
                num_layers=6,
                pipeline_model_parallel_size=3,
                tensor_model_parallel_size=1,
                num_microbatches=4 * pipelines,
                tokens_per_step=1000,
                train_steps=10,
            ),
            state=state,
            previous=home,
            usual_step_s=1.0,
            profile=in_cluster(Profile(costs=found), state),
            horizon_s=3600.0,
            mtbf_s=86400.0,
        )
        for sketch in replan.POLICY.propose(case):
            made = around(sketch.make(), case.profile.costs)
            step_s = scheduled("test", made, (), state, case.profile).step_s
            assert sketch.least_step_s <= step_s * (1 + 1e-9), sketch.note
            shorter += made.lengths != home.lengths
        for sketch, hasty in zip(
            replan.POLICY.propose(case), replan.POLICY.propose(replace(case, in_haste=True)), strict=True
        ):
            assert hasty.least_step_s >= sketch.least_step_s
            more += hasty.least_step_s > sketch.least_step_s
    assert shorter
    assert bool(more) == memory_is_known
