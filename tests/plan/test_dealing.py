"""Microbatches of unlike costs are dealt to routes: a permutation, no worse than their own order, and often best."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odyssey_megatron.plan.scheduling.dealing import deal, dearest


@st.composite
def steps(draw):
    """Costs, and routes that have as many places as they happen to have."""
    size = draw(st.integers(1, 40))
    costs = draw(st.lists(st.integers(1, 10**6), min_size=size, max_size=size))
    routes = draw(st.lists(st.sampled_from([0, 1, 5, 7]), min_size=size, max_size=size))
    return costs, routes


@given(steps())
def test_it_is_a_permutation_and_no_dearer(step):
    costs, routes = step
    order = deal(costs, routes)
    assert sorted(order) == list(range(len(costs)))
    natural = range(len(costs))
    assert 1.0 - 1e-12 <= dearest(costs, routes, order) <= dearest(costs, routes, natural)
    assert order == deal(costs, routes)
    if dearest(costs, routes, order) == dearest(costs, routes, natural):
        assert order == tuple(natural)


@given(steps())
def test_a_route_takes_its_microbatches_in_their_order(step):
    costs, routes = step
    order = deal(costs, routes)
    for route in set(routes):
        own = [one for one, of in zip(order, routes, strict=True) if of == route]
        assert own == sorted(own)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_close_to_the_best_of_all(seed):
    draw = random.Random(seed)
    costs = [draw.choice([100, 300, draw.randint(1, 1000)]) for _ in range(8)]
    routes = [draw.randrange(2) for _ in range(6)] + [0, 1]
    size, total = routes.count(0), sum(costs)
    halves = (sum(own) for own in itertools.combinations(costs, size))
    best = min(max(own / size, (total - own) / (8 - size)) for own in halves) / (total / 8)
    assert dearest(costs, routes, deal(costs, routes)) <= 1.05 * best


def test_a_route_that_has_more_places_is_to_cost_more():
    costs, routes = [4, 4, 1, 1, 1, 1, 4, 1], [0, 0, 1, 1, 1, 1, 1, 1]
    order = deal(costs, routes)
    own = sorted(costs[one] for one, route in zip(order, routes, strict=True) if route == 0)
    assert own == [1, 4]  # 2.5 each; the others have 13 for six: 2.2
    assert dearest(costs, routes, order) == pytest.approx(2.5 / (17 / 8))


def test_equal_costs_stay_in_order():
    assert deal([7] * 6, [0, 1, 0, 1, 0, 1]) == (0, 1, 2, 3, 4, 5)
    assert deal([1, 9, 3], [4, 4, 4]) == (0, 1, 2)


def test_a_large_step_is_dealt_evenly():
    """4,096 microbatches to 256 pipelines."""
    draw = random.Random(0)
    costs = [draw.randint(1000, 9000) for _ in range(4096)]
    routes = [one % 256 for one in range(4096)]
    order = deal(costs, routes)
    assert dearest(costs, routes, order) < 1.01 < dearest(costs, routes, range(4096))
