"""Pipelines that are cut for slow workers: the knapsack, the cuts and the layouts, each beside all that there are."""

import random
from itertools import combinations, pairwise, product

import pytest

from odyssey_megatron.cluster.state import Share
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.policy.shapes import ways
from odyssey_megatron.policy.shapes.kinds import Slow, healthy_of, mixed, sort_of, stages_of
from odyssey_megatron.policy.shapes.knapsack import packed
from odyssey_megatron.policy.shapes.search import Search
from odyssey_megatron.policy.shapes.seating import place
from odyssey_megatron.policy.shapes.splits import Splits, cut_of, stage_times_s
from tests.benchmarks import slow as benchmark
from tests.benchmarks.policies import SETTINGS
from tests.plan.samples import uniform_costs


def most_of_all(most, number, workers, slow):
    """The most that any choice of kinds does: every number of pipelines with slow workers, every way to fill up."""
    plain = {0: {0: 0}}
    for count in range(number):
        plain[count + 1] = {}
        for used, done in plain[count].items():
            for kind, more in most.items():
                if sort_of(kind) < 0 and used + kind <= workers:
                    plain[count + 1][used + kind] = max(plain[count + 1].get(used + kind, 0), done + more)
    best = 0
    choices = [[0, *(kind for kind in most if sort_of(kind) == sort)] for sort in slow]
    for chosen in product(*choices):
        kinds = [kind for kind in chosen if kind]
        used = sum(map(healthy_of, kinds))
        if len(kinds) <= number:
            for more, done in plain[number - len(kinds)].items():
                if used + more <= workers:
                    best = max(best, done + sum(most[kind] for kind in kinds))
    return best


@pytest.mark.parametrize("seed", range(200))
def test_the_knapsack_finds_the_most(seed):
    rng = random.Random(seed)
    workers, slow = rng.randint(1, 9), sorted(rng.choices((0, 1), k=rng.randint(0, 3)))
    most = {stages: rng.randint(1, 9) * stages for stages in range(1, workers + 1) if rng.random() < 0.8}
    for sort, stages in product({*slow}, range(1, workers + 2)):
        if rng.random() < 0.8:
            most[mixed(stages, sort)] = rng.randint(1, 9 * stages)
    number = rng.randint(1, workers)
    best = most_of_all(most, number, workers, slow)
    found = packed(most, number, workers, slow, best) if best else None
    if found is None:  # it leaves as many idle as there are pipelines, which would rather be longer
        return
    assert len(found) == number
    assert sum(map(healthy_of, found)) <= workers
    assert all(sum(sort_of(kind) == sort for kind in found) <= slow.count(sort) for sort in (0, 1))
    assert sum(most[kind] for kind in found) == best
    assert packed(most, number, workers, slow, best + 1) is None


def slowest_s(splits, ends, place_of_slow, slow):
    """The longest time that a stage takes for a microbatch; infinite if it does not fit."""
    cut = cut_of(splits.costs, splits.way)
    times_s = {
        one: stage_times_s(splits.costs, cut, splits.budget, splits.way, one) for one in (slow, Slow(1.0))
    }
    return max(
        times_s[slow if at == place_of_slow else Slow(1.0)][a, b]
        for at, (a, b) in enumerate(pairwise((0, *ends)))
    )


@pytest.mark.parametrize("way", [ways.ONCE, ways.V, ways.Way(2)])
@pytest.mark.parametrize("memory", [None, 70, 50])
@pytest.mark.parametrize(
    "slow", [Slow(0.8), Slow(0.4), Slow(0.5, Share(0.5)), Slow(1.0, Share(0.25)), Slow(0.5, Share(0.5, 0.5))]
)
def test_no_place_and_no_cut_is_faster(slow, memory, way):
    costs = uniform_costs(9, ends=True)
    splits = Splits(costs, memory, way=way)
    (sort,) = splits.sorts.numbers([slow])
    for stages in range(1, min(5, splits.most_stages) + 1):
        every = []
        for cut in combinations(range(1, splits.last), stages - 1):
            ends = (*cut, splits.last)
            windows = (ways.window(at, stages, splits.last, way) for at in range(stages))
            if all(low <= end <= high for end, (low, high) in zip(ends, windows, strict=True)):
                every += [slowest_s(splits, ends, at, slow) for at in range(stages)]
        kind = mixed(stages, sort)
        found = splits.split(kind)
        if found is None:
            assert min(every) == float("inf")
        else:
            assert slowest_s(splits, found, splits.slow_place(kind), slow) == pytest.approx(min(every))
            assert [one.share for one in splits.stages(kind)].count(slow.share) >= 1


def test_a_slow_worker_is_never_worse_than_none():
    """And a faster one never worse than a slower one, but for what other ways through the workers must gain."""
    costs = uniform_costs(12, ends=True, message_s=0.1)
    for memory in (None, 60, 40):
        search = Search(costs, memory, revisits=True)
        without = search.partitions(7, 16)[0].estimate_s
        steps = [search.partitions(7, 16, [Slow(speed)])[0].estimate_s for speed in (0.2, 0.5, 0.8)]
        assert max(steps) <= without
        assert all(faster <= slower * 1.02 for slower, faster in pairwise(steps))
        assert search.partitions(8, 16)[0].estimate_s <= min(steps) * 1.01


def test_a_slow_worker_sits_where_its_pipeline_is_cut_for_it():
    costs = uniform_costs(12, ends=True)
    search = Search(costs)
    routes = (
        pipeline_route((0, 1, 2, 3), (4, 7, 10, 14), range(8)),
        pipeline_route((4, 5, 6, 7), (4, 7, 10, 14), range(8, 16)),
    )
    previous = layout_from_routes(14, routes)
    slow = {2: Slow(0.6)}
    found = next(
        one
        for one in search.partitions(7, 16, [*slow.values()])
        if any(sort_of(k) >= 0 for k, _ in one.shares)
    )
    shape = search.shape_of(found, 7, 16)
    layout = place(shape, (0, 1, 3, 4, 5, 6, 7), previous, costs, None, slow).check()
    assert len(shape.slow) == 1
    ((route, hop),) = [(route, hop) for route in layout.routes for hop in route.hops if hop.worker == 2]
    others = [one.last - one.first for one in route.hops if one.worker != 2]
    assert hop.last - hop.first < max(others, default=14)
    assert sum(stages_of(kind) for kind, _ in found.shares) <= 8


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_benchmark_s_decisions_are_verified_and_better_than_to_leave_it_out(setting):
    dp, pp, microbatches = setting
    row = benchmark.measured(dp, pp, microbatches, 0.65)
    assert row["over_left_out"] >= 1.0
    assert row["over_nothing"] >= 1.0
