"""A short pipeline whose gap slides from stage to stage."""

import itertools
from itertools import pairwise

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.plan.scheduling.gathers import ending_s
from odyssey_megatron.plan.scheduling.reductions import buckets
from odyssey_megatron.policy.shapes.search import Search
from odyssey_megatron.policy.shapes.slide import _NEAR, _Slide, slid, windows
from tests.benchmarks.policies import job_of, profile_of, recover
from tests.plan.samples import preset_profile, uniform_costs


@pytest.mark.parametrize("legs", [1, 2, 4])
@pytest.mark.parametrize(("stages", "lacks"), [(16, 1), (16, 4), (8, 3), (5, 2), (3, 2), (2, 1)])
def test_gaps_slide_along_parts_of_their_own(stages, lacks, legs):
    found = windows(stages, lacks, legs)
    assert len(found) == legs
    for of_leg in found:
        assert all(one.stop <= other.start for one, other in pairwise(of_leg))
        assert all(0 <= one.start < one.stop <= stages for one in of_leg)
    if stages >= lacks * legs:  # no stage has the gaps of two legs, so that no worker holds two parts more
        every = [place for of_leg in found for one in of_leg for place in one]
        assert sorted(every) == [*range(stages)]


@pytest.mark.parametrize(
    ("setting", "memory", "dead", "before_s"),
    [
        ((2, 16, 32), (0, 4), (5,), 237),
        ((2, 16, 32), (0, 4), (5, 18), 249),
        ((4, 8, 32), (0, 4), (5, 18), 441),
    ],
)
def test_where_memory_is_tight_all_share_what_the_dead_leave(setting, memory, dead, before_s):
    """``before_s``: the step of the best pipelines of unequal lengths, 2 to 6 % longer."""
    job, profile = job_of(*setting), profile_of(setting[1], *memory)
    decision = recover(job, profile, dead)[1]
    assert decision.candidates[0].name == "slide"
    assert decision.plan.step_s <= 0.985 * before_s
    layout = decision.plan.layout
    assert set(layout.workers) == set(range(32)) - set(dead)
    # A gap that has two stages to slide along leaves each layer as many holders as before.
    least = setting[0] - (setting == (4, 8, 32))
    assert min(map(len, layout.holders)) == least
    assert max(size for _, size in decision.plan.peak_bytes) <= profile.costs.memory_bytes


def test_who_is_along_the_gap_s_way_holds_one_part_more():
    """31 workers with 32 layers: in a V of 16 stages each has a layer of each leg, in the short pipeline three."""
    job, profile = job_of(2, 16, 32), profile_of(16, 0, 4)
    layout = recover(job, profile, (5,))[1].plan.layout
    middle = {*range(1, layout.num_layers - 1)}
    held = sorted(len(middle.intersection(layout.held_by(worker))) for worker in layout.workers)
    assert held[:16] == [2] * 16
    assert set(held[16:]) <= {2, 3}


def test_nothing_slides_where_pipelines_are_whole_or_it_is_not_worth_it():
    own = Search(uniform_costs(8, ends=True), 10**9, revisits=True)
    assert slid(own, 8, 16) is None, "8 workers of one stage each have all the work there is"
    assert slid(own, 1, 4) is None


def test_the_estimate_is_the_step_of_its_order():
    job, profile = job_of(2, 16, 32), profile_of(16, 0, 4)
    decision = recover(job, profile, (5,))[1]
    own = decision.case.search
    shape = slid(own, 31, 64)
    assert shape is not None
    layout, costs = decision.plan.layout, profile.costs
    end_s = ending_s(layout, buckets(layout, costs), costs)
    assert shape.estimate_s + end_s == pytest.approx(decision.plan.step_s, rel=1e-12)
    assert slid(own, 31, 64) is shape, "it is looked up"


def test_slices_of_optimizer_state_are_summed_for_their_owners():
    """Llama-2 7B on 31 of 32 H100s with two copies: what was left over, through several pipelines, took 0.969 s."""
    profile = preset_profile("llama2-7b", "h100")
    job = JobSpec(
        num_layers=34,
        pipeline_model_parallel_size=8,
        tensor_model_parallel_size=1,
        num_microbatches=64,
        tokens_per_step=64 * 4096,
        train_steps=1,
        optimizer_copies=2,
    )
    decision = recover(job, profile, (5,))[1]
    assert decision.candidates[0].name == "slide"
    assert decision.plan.layout.copies == 2
    assert decision.plan.step_s < 0.945
    shape = slid(decision.case.search, 31, 64)
    assert shape is not None
    assert shape.estimate_s == pytest.approx(decision.plan.step_s, rel=0.01)


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize(("workers", "microbatches"), [(31, 64), (29, 32)])
def test_no_layout_is_below_the_estimate_of_its_whole_pipelines(workers, microbatches, copies):
    """For which most shapes are left out without a layout."""
    costs, looked_at = preset_profile("llama2-7b", "h100").costs, 0
    search = Search(costs, costs.memory_bytes, copies, revisits=True)
    for own, number in itertools.product((search, *search.revisiting), range(2, 17)):
        for stages in range(workers // number + 1, -(-workers // (number - 1))):
            one = _Slide.of(own, number, stages, workers, microbatches)
            for _, bound_s, _ in one.bounded() if one else ():
                looked_at += 1
                assert one.whole_s() * _NEAR <= bound_s
    assert looked_at
