"""Microbatches that do not divide among pipelines."""

from dataclasses import replace
from itertools import pairwise

import pytest

from odyssey_megatron.plan.checking.bound import cluster_bound_s
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.policy.shapes import ways
from odyssey_megatron.policy.shapes.divide import divided, named
from odyssey_megatron.policy.shapes.search import Search
from odyssey_megatron.policy.shapes.seating import place
from tests.benchmarks import llama
from tests.benchmarks.policies import LAYERS, job_of, profile_of, recover
from tests.plan.samples import uniform_costs


def search(memory_bytes=10**9, layers=8):
    return Search(uniform_costs(layers, ends=True), memory_bytes, revisits=True)


def home(workers, microbatches, layers=8):
    return megatron_layout(
        num_layers=layers + 2, pipeline_size=1, num_workers=workers, num_microbatches=microbatches
    )


@pytest.mark.parametrize(("workers", "microbatches"), [(7, 16), (5, 16), (11, 24)])
def test_who_computes_what_is_left_over_holds_it_anyway(workers, microbatches):
    own = search()
    shapes = divided(own, workers, microbatches)
    assert shapes
    for shape in shapes:
        layout = place(shape, range(workers), home(workers, microbatches), own.splits.costs)
        assert layout.check().num_microbatches == microbatches
        assert set(layout.workers) == {*range(workers)}
        assert 0 < len(shape.further) == microbatches - sum(shape.shares) < len(shape.ends)
        held = [spans for ends in shape.ends for spans in ways.spans(ends, shape.way)]
        for route in shape.further:
            assert all(any(a <= first and end <= b for a, b in held[seat]) for seat, first, end in route)
            assert all(one[0] != other[0] for one, other in pairwise(route))


def test_nothing_is_left_over_where_microbatches_divide():
    assert not divided(search(), 8, 16)


def test_what_is_left_over_costs_no_memory_that_is_not_there():
    """A worker has room for the layers of a pipeline of four, and so has every holder of what is left over."""
    costs = uniform_costs(8, ends=True)
    spans = costs.spans
    room = spans.kept_bytes(0, 3) + 6 * spans.activation_bytes(0, 3)
    own = search(room)
    for shape in divided(own, 7, 16):
        assert all(
            sum(spans.kept_bytes(a, b) for a, b in each) <= room
            for ends in shape.ends
            for each in ways.spans(ends, shape.way)
        )


@pytest.mark.parametrize(("dead", "before_s"), [((5,), 417), ((5, 18), 427), ((5, 14, 18, 27), 451)])
def test_with_workers_dead_all_others_are_busy(dead, before_s):
    """128 microbatches over 31, 30 and 28 workers: within 1 % of what nobody could be below. Whole microbatches through
    pipelines of any lengths took 4 % longer, or 2 %.
    """
    job, profile = job_of(4, 8, 32), profile_of(8, None, 0)
    plan = recover(job, profile, dead)[1].plan
    assert plan.policy == "divide"
    least_s = cluster_bound_s(128, profile.costs, range(32 - len(dead)))
    assert least_s <= plan.step_s <= 1.01 * least_s < before_s


def test_the_table_says_how_many_there_are():
    shape = divided(search(layers=LAYERS), 31, 64)[0]
    assert named(shape).endswith("of 64 microbatches through several of them")


def test_what_is_left_over_is_done_in_time_for_its_sums():
    """31 of 32 workers, 64 microbatches of Llama-2 13B, whose sums take a fifth of a step. Orders that were chosen by
    their compute alone took 6.18 s, and whole microbatches take 5.72 s.
    """
    setting = llama.SETTINGS[1]
    profile = llama.profile_of(setting, None)
    profile = replace(profile, costs=profile.costs.without_ends)
    decision = recover(llama.job_of(setting, profile.costs), profile, (5,))[1]
    assert decision.candidates[0].name == "divide"
    assert decision.plan.step_s < 5.5
