"""Orders are found with times in round numbers, and timed by the real ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import inf

import pytest

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.plan.scheduling import list_schedule
from odyssey_megatron.plan.scheduling.list_schedule import best_order
from odyssey_megatron.plan.scheduling.tasks import (
    TICKS_PER_S,
    Shape,
    by_number,
    finished,
    numbered_tasks,
    rounded,
    rows_of,
    summed,
    tasks_of,
)
from tests.plan.samples import layer, measured, uniform_costs

LAYERS = 32


def shape_of(stages: int, microbatches: int, more: int, visits: int = 1) -> Shape:
    """A pipeline whose workers have the activation memory of 1F1B's first one, and of ``more`` microbatches."""
    each = LAYERS // stages // visits
    return Shape(
        routes=(
            (
                tuple(range(microbatches)),
                tuple((at % stages, at * each, (at + 1) * each) for at in range(stages * visits)),
            ),
        ),
        caps=((stages + more) * each * visits,) * stages,
        speeds=(1.0,) * stages,
    )


SHAPES = [(8, 16, 0), (8, 16, 1), (8, 32, -2), (4, 16, 1), (16, 32, 0), (8, 16, 1, 2), (4, 12, 0, 2)]


@pytest.mark.parametrize("args", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_by_measured_times_an_order_is_hardly_longer_than_by_equal_ones(args, seed):
    shape, equal = shape_of(*args), uniform_costs(LAYERS)
    message_s = 0.02
    took_s, least_s = (
        max(best_order(shape, one).done_s) for one in (measured(equal, seed, message_s=message_s), equal)
    )
    assert took_s <= least_s * 1.015 + 2 * message_s * len(shape.routes[0][1])


@pytest.mark.parametrize("args", SHAPES)
def test_an_order_is_timed_by_real_times(args):
    shape, costs = shape_of(*args), measured(uniform_costs(LAYERS), message_s=0.02)
    solved, tasks = best_order(shape, costs), numbered_tasks(shape, costs)
    queues = [[(code & 7) * len(tasks.visits) + (code >> 3) for code in queue] for queue in solved.queues]
    assert finished(tasks, queues) == [round(done_s * TICKS_PER_S) for done_s in solved.done_s]


def test_who_has_waited_in_vain_is_timed_as_in_a_job():
    """Three pipelines of two stages with one worker more behind them all. While an order was looked for, some
    waited for a forward that then did not fit into their memory, and computed something else later than they could
    have.
    """
    heavy = layer(0.9, 0.9, 1.9, activation_bytes=31)
    ends = layer(0.002, 0.006, 0.02, activation_bytes=39), layer(2.0, 0.8, 0.6, activation_bytes=13)
    costs = replace(uniform_costs(6, message_s=0.39), layers=(ends[0], *(heavy,) * 4, ends[1]))
    whole = ((0, 5, 8, 13), 0, 1), ((1, 6, 9, 14), 2, 3), ((2, 7, 10, 15), 4, 5)
    left = ((3, 11), 0, 6), ((4,), 2, 6), ((12,), 4, 6)
    shape = Shape(
        routes=tuple((ids, ((first, 0, 3), (last, 3, 6))) for ids, first, last in (*whole, *left)),
        caps=(202, 150) * 3 + (150,),
        speeds=(1.0,) * 7,
        sums_s=(4.1, 4.3) * 3 + (4.3,),
    )
    solved, tasks = best_order(shape, costs), numbered_tasks(shape, costs)
    queues = [[(code & 7) * len(tasks.visits) + (code >> 3) for code in queue] for queue in solved.queues]
    assert finished(tasks, queues) == [round(done_s * TICKS_PER_S) for done_s in solved.done_s]


@pytest.mark.parametrize("args", [(4, 16, 0), (4, 16, -2), (8, 32, -6), (4, 12, 0, 2)])
@pytest.mark.parametrize("grows", [1, 6, 16])
def test_what_an_input_gradient_computes_again_fits_into_memory(args, grows):
    """With full recomputation a layer keeps its input, and from its input gradient on what the weight gradient needs.
    There is room for what one input gradient adds, and then for three.
    """
    took_s, costs = [], uniform_costs(LAYERS)
    again = costs.with_layers(replace(one, early_bytes=-grows * one.activation_bytes) for one in costs.layers)
    for times in (1, 3):
        shape = shape_of(*args)
        span = shape.routes[0][1][0]
        more = times * grows * (span[2] - span[1])
        shape = replace(shape, caps=tuple(cap + more for cap in shape.caps))
        solved, tasks = best_order(shape, again), numbered_tasks(shape, again)
        count = len(tasks.visits)
        for queue, cap in zip(solved.queues, shape.caps, strict=True):
            sizes = [tasks.size[(code & 7) * count + (code >> 3)] for code in queue]
            assert max(accumulate(sizes)) <= cap
            assert sum(sizes) == 0
        took_s.append(max(solved.done_s))
    assert took_s[1] <= took_s[0]
    with pytest.raises(PlanInfeasible, match="more bytes of activations"):
        best_order(replace(shape, caps=tuple(span[2] - span[1] + more // 3 - 1 for _ in shape.caps)), again)


@pytest.mark.parametrize("args", SHAPES)
@pytest.mark.parametrize("times", [0.5, 0.999999, 1.000001, 1.5])
def test_a_limit_says_whether_an_order_is_in_time_and_changes_nothing_else(args, times):
    shape, costs = shape_of(*args), measured(uniform_costs(LAYERS), message_s=0.02)
    solved = best_order(shape, costs)
    found = best_order(shape, costs, [max(solved.done_s) * times] * len(shape.caps))
    assert found == (solved if times > 1 else None)


@pytest.mark.parametrize("args", SHAPES)
def test_so_does_a_limit_of_each_workers_own(args):
    shape, costs = shape_of(*args), measured(uniform_costs(LAYERS), message_s=0.02)
    solved = best_order(shape, costs)
    ends_s = [done_s + 1e-6 for done_s in solved.done_s]
    assert best_order(shape, costs, ends_s) == solved
    first = ends_s.index(min(ends_s))
    ends_s[first] = 0.9 * solved.done_s[first]
    found = best_order(shape, costs, ends_s)
    assert found is None or all(a <= b for a, b in zip(found.done_s, ends_s, strict=True))


@pytest.mark.parametrize("args", [(8, 14, 0), (8, 12, -2), (16, 24, -4)])
def test_a_worker_rather_waits_for_what_comes_soon_than_begins_a_weight_gradient(monkeypatch, args):
    shape = shape_of(*args)
    costs = uniform_costs(LAYERS, message_s=0.3, forward_s=3.0, input_grad_s=4.0, weight_grad_s=2.0)
    took_s = max(best_order(shape, costs).done_s)
    monkeypatch.setattr(list_schedule, "_PATIENT_ALONE", ())
    assert took_s < 0.993 * max(best_order(shape, costs).done_s)


def test_orders_are_compared_by_when_their_sums_end():
    """Two routes share a worker: with sums more weight gradients are left for the end, which may be a little later."""
    costs = measured(uniform_costs(LAYERS, message_s=0.1), message_s=0.1)
    without = replace(rerouted((4,) * 8, 2, 8), caps=(10**6,) * 15)
    shape = replace(without, sums_s=(60.0,) * 15)
    tasks = numbered_tasks(shape, costs)

    def summed_s(solved):
        queues = [[(code & 7) * len(tasks.visits) + (code >> 3) for code in queue] for queue in solved.queues]
        done = finished(tasks, queues)
        assert done == [round(done_s * TICKS_PER_S) for done_s in solved.done_s]
        return summed(tasks, queues, done) / TICKS_PER_S

    by_sums, by_compute = best_order(shape, costs), best_order(without, costs)
    assert max(by_sums.done_s) <= summed_s(by_sums) < 0.95 * summed_s(by_compute)


def test_round_times():
    costs = uniform_costs(LAYERS, weight_grad_s=0.52)
    heavy = replace(costs, layers=(*costs.layers[:-1], replace(costs.layers[-1], forward_s=3.4)))
    tasks = numbered_tasks(shape_of(LAYERS, 2, 0), measured(heavy, message_s=0.02))
    coarse, fine = rounded(tasks, 1), rounded(tasks, 8)
    (part,) = {one for one in coarse.ticks if one <= min(coarse.ticks)}
    assert part == pytest.approx(0.52 * TICKS_PER_S, rel=0.01)
    assert {one / part for one in coarse.ticks} == {1, 2, 7}, "of what takes as long, one time"
    assert max(abs(a / b - 1) for a, b in zip(fine.ticks, tasks.ticks, strict=True)) < 1 / 8 / 2 + 0.03
    assert all(one >> tasks.bits == 0 for one in coarse.then), "messages take no time"
    late = replace(shape_of(LAYERS, 2, 0), lags_s=((0, 1, 1.5),))
    lags = {one >> tasks.bits for one in rounded(numbered_tasks(late, costs), 1).then}
    assert lags == {0, 2 * round(0.52 * TICKS_PER_S)}, "but over slow links"


def test_equal_times_are_round():
    tasks = numbered_tasks(shape_of(8, 16, 0), uniform_costs(LAYERS))
    assert rounded(tasks, 1) == tasks


def test_who_waits_for_each_other_is_never_done():
    shape, costs = shape_of(2, 1, 0), uniform_costs(LAYERS)
    tasks = numbered_tasks(shape, costs)
    assert finished(tasks, [[0, 2, 4], [1, 3, 5]]) is not None
    assert finished(tasks, [[2, 0, 4], [1, 3, 5]]) is None


def rerouted(spans: tuple[int, ...], pipelines: int, microbatches: int) -> Shape:
    """Stages of so many layers each; of each pipeline but the first a stage is dead, and the one before does it."""
    stages, ends = len(spans), [0, *accumulate(spans)]
    ways = [
        tuple(
            ((one - 1 if one and at == one % stages else one) * stages + at, ends[at], ends[at + 1])
            for at in range(stages)
        )
        for one in range(pipelines)
    ]
    seats = {worker: seat for seat, worker in enumerate(dict.fromkeys(hop[0] for way in ways for hop in way))}
    return Shape(
        routes=tuple(
            (
                tuple(range(one, pipelines * microbatches, pipelines)),
                tuple((seats[worker], first, last) for worker, first, last in way),
            )
            for one, way in enumerate(ways)
        ),
        caps=(2 * stages * max(spans),) * len(seats),
        speeds=(1.0,) * len(seats),
    )


@pytest.mark.parametrize(("pipelines", "tries"), [(2, 7), (5, 3), (8, 2), (16, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_of_a_group_of_thousands_of_visits_few_orders_are_tried_and_a_good_one_found(
    monkeypatch, pipelines, tries, seed
):
    """Deciding has to be quick. By the coarsest times such an order took up to 1.4 times as long."""
    shape = rerouted((3, 3, 2, 3, 3, 3, 3, 3, 2, 2, 2, 2, 3), pipelines, 40)
    costs = uniform_costs(34, forward_s=4.05, input_grad_s=4.34, weight_grad_s=3.76, message_s=0.69)
    costs = measured(costs, seed, message_s=0.69)
    tasks = tasks_of(shape, rows_of(shape, costs), by_number(shape))
    real, target, tried = list_schedule._list_schedule, list_schedule._targets(tasks)[0], []
    monkeypatch.setattr(list_schedule, "_list_schedule", lambda *args: tried.append(1) or real(*args))
    took = max(best_order(shape, costs).done_s) * TICKS_PER_S
    assert len(tried) <= tries
    assert len(tried) == 1 or len(tried) * len(shape.visits()) <= 8192
    ends = [inf] * len(shape.caps)
    others = [
        list_schedule._better(None, list_schedule._try(tasks, parts), target, ends).longest
        for parts in (1, 4, 0)
    ]
    assert took <= 1.06 * min(others)
