"""Routes that visit workers more than once: how they are cut, and where they are proposed."""

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.layout import layout_from_routes
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.shapes import ways
from odyssey_megatron.policy.shapes.partition import ranked
from odyssey_megatron.policy.shapes.pipelines import WORTH
from odyssey_megatron.policy.shapes.search import Search
from odyssey_megatron.policy.shapes.splits import Splits
from tests.benchmarks.policies import LAYERS, costs
from tests.plan.samples import layer, preset_profile, uniform_costs


@pytest.mark.parametrize(
    ("ends", "way", "visits"),
    [
        ((3, 5, 8), ways.ONCE, ((0, 0, 3), (1, 3, 5), (2, 5, 8))),
        ((4, 6, 8), ways.V, ((0, 0, 2), (1, 2, 3), (2, 3, 5), (1, 5, 6), (0, 6, 8))),
        ((3, 5, 8), ways.Way(2), ((0, 0, 2), (1, 2, 3), (2, 3, 4), (0, 4, 5), (1, 5, 6), (2, 6, 8))),
        ((6, 10), ways.W, ((0, 0, 2), (1, 2, 4), (0, 4, 6), (1, 6, 8), (0, 8, 10))),
    ],
)
def test_a_way_goes_down_and_up_or_down_again(ends, way, visits):
    assert ways.visits(ends, way) == visits


@pytest.mark.parametrize("way", [ways.ONCE, *ways.MORE])
@pytest.mark.parametrize("last", [10, 13, 34])
def test_each_worker_has_a_part_of_every_leg(last, way):
    costs = uniform_costs(last - 2, ends=True)
    splits = Splits(costs, way=way)
    assert sorted(ways.in_turn(last, way)) == [*range(last)]
    for stages in range(2, splits.most_stages + 1):
        ends = splits.split(stages)
        route = ways.route(range(stages), ends, way, (0,))
        layout_from_routes(last, (route,))
        ends_of_model = route.hops[0].last, route.hops[-1].first
        assert 2 <= ends_of_model[0], "with a transformer layer"
        assert ends_of_model[1] <= last - 2, "with a transformer layer"
        own = ways.spans(ends, way)
        assert all(1 <= len(spans) <= way.legs for spans in own)
        held = [sum(min(b, last - 1) - max(a, 1) for a, b in spans) for spans in own]
        assert max(held) - min(held) <= 1, "embedding and head cost nothing"


def job(dp, pp, microbatches, **more):
    return JobSpec(
        num_layers=LAYERS + 2, pipeline_model_parallel_size=pp, tensor_model_parallel_size=1,
        num_microbatches=dp * microbatches, tokens_per_step=1, train_steps=1, **more,
    )  # fmt: skip


def profile(pp, extra=0):
    """Memory for what 1F1B's first stage keeps, and ``extra`` microbatches."""
    return Profile(costs=costs(LAYERS // pp * (pp + 4 + extra), 4), group_build_s=0.0)


STATE = initial_state(nodes=tuple(worker // 8 for worker in range(32)))


@pytest.mark.parametrize(
    ("setting", "stages_in_a_row_s", "at_most_s"),
    [
        ((4, 8, 16), 220.0, 206.0),
        ((4, 8, 32), 412.0, 398.0),
        ((8, 4, 16), 408.0, 396.0),
        ((2, 16, 32), 222.0, 207.0),
    ],
)
def test_a_healthy_job_has_shorter_steps(setting, stages_in_a_row_s, at_most_s):
    """With one microbatch more than 1F1B's memory, without communication; the bubble is half as long, or less."""
    healthy = [
        initial_plan(job(*setting, best_layout=True, revisits=revisits), STATE, profile(setting[1], 1))
        for revisits in (False, True)
    ]
    assert healthy[0].step_s == stages_in_a_row_s
    assert not healthy[0].layout.revisits
    assert healthy[1].step_s <= at_most_s
    assert healthy[1].layout.revisits
    assert all(len(holders) >= 2 for holders in healthy[1].layout.holders)


@pytest.mark.parametrize("dead", [(5,), (5, 14, 18, 27)])
@pytest.mark.parametrize("extra", [0, 1])
def test_after_a_loss_they_are_taken_where_they_are_faster(dead, extra):
    state, steps = STATE, []
    for rank in dead:
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=0.0))
    for revisits in (False, True):
        spec = job(4, 8, 16, revisits=revisits)
        config = OdysseyConfig(horizon_s=1e9, mtbf_s=1e9)
        previous = initial_plan(spec, STATE, profile(8, extra))
        assert not previous.layout.revisits, "the launch line's"
        found = decide(
            job=spec, state=state, previous=previous, profile=profile(8, extra), config=config, now_s=0.0
        )
        assert found.plan.layout.revisits == revisits
        steps.append(found.plan.step_s)
    assert steps[1] < WORTH * steps[0]
    assert "in a V" in found.candidates[0].reason or "in a W" in found.candidates[0].reason


@pytest.mark.parametrize(("number", "at_most_s"), [(2, 223.0), (3, 237.0)])
def test_what_is_late_for_want_of_memory_does_not_hide_the_others(number, at_most_s):
    """Five workers a pipeline have more layers each than leave room for microbatches; eight, eight, eight and six not:
    244 and 252 are what workers in a row take.
    """
    state = STATE
    for rank in (5, 18, 27)[:number]:
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=0.0))
    spec, tight = job(4, 8, 16, revisits=True), profile(8)
    found = decide(
        job=spec, state=state, previous=initial_plan(spec, STATE, tight), profile=tight,
        config=OdysseyConfig(horizon_s=1e9, mtbf_s=1e9), now_s=0.0,
    )  # fmt: skip
    assert found.plan.step_s <= at_most_s


@pytest.mark.parametrize("memory", [17, 22, 40, 1000])
@pytest.mark.parametrize("message_s", [0.0, 0.5])
def test_nothing_is_slower_for_having_them(memory, message_s):
    """Where memory binds, or messages take long, the others are still there; what is promised is what is scheduled."""
    found = replace(uniform_costs(8, ends=True, message_s=message_s), memory_bytes=memory)
    for workers in (4, 5, 6, 7):
        alone = ranked(Search(found, memory), workers, 8)
        both = ranked(Search(found, memory, revisits=True), workers, 8)
        assert [one for one in both if one.way == ways.ONCE] == [*alone]
        turned = [one.estimate_s for one in both if one.way.legs > 1]
        assert all(step_s < WORTH * alone[0].estimate_s for step_s in turned)
        assert min(one.estimate_s for one in both) == both[0].estimate_s


def test_nobody_is_left_out_for_them():
    """Six layers have room for four legs on one worker only, and without the other there would be nothing to sum."""
    found = replace(uniform_costs(4, ends=True), link_bytes_per_s=0.01)
    both = ranked(Search(found, revisits=True), 2, 8)
    assert all(sum(stages for stages, _ in one.shares) == 2 for one in both if one.shares)


def test_virtual_stages_ask_for_them():
    spec = job(4, 8, 16, revisits=True)
    assert not initial_plan(spec, STATE, profile(8)).layout.revisits
    asked = initial_plan(replace(spec, virtual_stages=2), STATE, profile(8))
    assert asked.layout.revisits
    assert len(asked.layout.routes) == 4
    assert {len({hop.worker for hop in route.hops}) for route in asked.layout.routes} == {8}
    impossible = replace(spec, virtual_stages=2, revisits=False)
    assert not initial_plan(impossible, STATE, profile(8)).layout.revisits


def test_stages_stay_as_many_as_were_asked_for():
    """With six layers three workers have no part of four legs each; fewer would do with less communication."""
    found = Profile(costs=uniform_costs(6, ends=True, message_s=10.0), group_build_s=0.0)
    spec = JobSpec(
        num_layers=8, pipeline_model_parallel_size=3, tensor_model_parallel_size=1, num_microbatches=4,
        tokens_per_step=1, train_steps=1, revisits=True, virtual_stages=2,
    )  # fmt: skip
    (route,) = initial_plan(spec, initial_state(nodes=(0, 0, 0)), found).layout.routes
    assert {hop.worker for hop in route.hops} == {0, 1, 2}


def test_both_ends_on_one_worker_share_a_weight_once():
    """Of a V: the first worker has embedding and head, and one copy of what they share."""
    found = replace(uniform_costs(8, ends=True), tied=layer(0.0, 0.0, 0.0, 0))
    splits = Splits(found, 1000, way=ways.V)
    first, *_, turn = splits.stages(3)
    assert (first.spans[0][0], first.spans[-1][1]) == (0, 10)
    own = [found.layers[one] for a, b in first.spans for one in range(a, b)]
    assert splits.kept_bytes(first) == sum(one.kept_bytes for one in own) + found.tied.kept_bytes
    assert splits.kept_bytes(turn) == sum(found.layers[one].kept_bytes for one in range(*turn.spans[0]))


def test_where_the_way_turns_the_longer_stage_is_in_front():
    """Of cuts that are equal on paper: with more memory, which allows both, steps were 3 % longer."""
    unit, one = 2**30, layer(1e-3, 1e-3, 1e-3, 2**30)
    one = replace(one, weight_bytes=unit, gradient_bytes=unit, optimizer_bytes=2 * unit)
    found = uniform_costs(6, ends=True)
    layers = (found.layers[0], *(one,) * 6, layer(1e-3, 1e-3, 1e-3, 0))
    found = replace(found, layers=layers, link_bytes_per_s=1e12)
    spec = JobSpec(
        num_layers=8, pipeline_model_parallel_size=3, tensor_model_parallel_size=1, num_microbatches=12,
        tokens_per_step=1, train_steps=1, best_layout=True,
    )  # fmt: skip
    state = initial_state(nodes=(0,) * 6)
    profiles = [Profile(costs=replace(found, memory_bytes=room * unit)) for room in (18, 20, 22, 24, 30, 40)]
    plans = [initial_plan(spec, state, profile) for profile in profiles]
    assert Splits(profiles[2].costs, 22 * unit, way=ways.V).split(2) == (5, 8)
    steps = [plan.step_s for plan in plans]
    assert steps == sorted(steps, reverse=True)


def test_an_interleaved_healthy_job_is_faster_where_a_head_takes_long():
    """In a V one worker has embedding and head; the step of the best pipelines without is 3 % longer."""
    profile = preset_profile("llama3-8b", "h100")
    profile = replace(profile, costs=replace(profile.costs, memory_bytes=2**50), group_build_s=0.0)
    spec = JobSpec(
        num_layers=len(profile.costs.layers), pipeline_model_parallel_size=16, tensor_model_parallel_size=1,
        num_microbatches=64, tokens_per_step=64, train_steps=1, best_layout=True,
    )  # fmt: skip
    plan = initial_plan(spec, STATE, profile)
    workers = [hop.worker for hop in plan.layout.routes[0].hops]
    once = len({*workers})
    assert workers == workers[:once] * (len(workers) // once)
    assert len(workers) > once
