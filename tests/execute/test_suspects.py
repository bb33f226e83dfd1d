"""Who made the first number that is not finite, and whether others make it, too."""

from __future__ import annotations

import random

import pytest

from odyssey_megatron.plan.layout import Layout, layout_from_routes, pipeline_route
from odyssey_megatron.plan.schedule import Op

pytest.importorskip("torch")

FORWARD, BACKWARD, GRADIENT = Op.SEND_FORWARD, Op.SEND_BACKWARD, Op.REDUCE_GRAD
KINDS = (FORWARD, BACKWARD, GRADIENT)


def pipelines(*workers: tuple[int, ...], each: int = 2) -> Layout:
    """A pipeline of each tuple of workers, of two layers each, with ``each`` microbatches."""
    stages = len(workers[0])
    return layout_from_routes(
        2 * stages,
        tuple(
            pipeline_route(
                one, tuple(range(2, 2 * stages + 1, 2)), tuple(range(at, each * len(workers), len(workers)))
            )
            for at, one in enumerate(workers)
        ),
    )


def marks_of(layout: Layout, wrong) -> frozenset:
    """What a step leaves, if ``wrong(kind, microbatch, hop)`` says where a number that is not finite is made."""
    marks = set()
    for route in layout.routes:
        for microbatch in route.microbatches:
            bad = False
            for hop in route.hops:
                bad = bad or wrong(FORWARD, microbatch, hop)
                if bad:
                    marks.add((FORWARD, microbatch, hop.last - 1))
            for hop in reversed(route.hops):
                bad = bad or wrong(BACKWARD, microbatch, hop)
                if bad or wrong(GRADIENT, microbatch, hop):
                    marks |= {
                        (GRADIENT, hop.worker, one.first)
                        for one in layout.blocks()
                        if hop.first <= one.first < hop.last
                    }
                if bad and hop.first:
                    marks.add((BACKWARD, microbatch, hop.first))
    return frozenset(marks)


def found_guilty(layout: Layout, first, second=None) -> list[int]:
    from odyssey_megatron.execute.suspects import Inquiry, in_place, suspects

    inquiry = Inquiry(layout, suspects(layout, marks_of(layout, first)))
    for _ in range(3):
        if not (exchange := inquiry.next_exchange()):
            break
        assert all(exchange[other] == one for one, other in exchange.items())
        moved = in_place(layout, exchange).check()
        marks = marks_of(moved, second or first)
        inquiry.hear(moved, suspects(moved, marks), finite=not marks)
    return inquiry.guilty


def nothing(kind, microbatch, hop):
    return False


def made_by(worker: int, kind: Op):
    return lambda at, microbatch, hop: (at, hop.worker) == (kind, worker)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("worker", range(4))
def test_who_makes_them_is_found(kind, worker):
    for layout in (
        pipelines((0, 1), (2, 3)),
        pipelines((0,), (1,), (2,), (3,)),
        pipelines((0, 3), (1, 4), (2, 3), each=4),
    ):
        if (kind, worker) == (BACKWARD, layout.routes[worker % 2].hops[0].worker):
            continue  # the first stage makes no gradient for others
        others = [one for one in layout.routes if all(hop.worker != worker for hop in one.hops)]
        if worker not in layout.workers or not others:
            continue
        made = marks_of(layout, made_by(worker, kind))
        expected = [worker] if made else []
        assert found_guilty(layout, made_by(worker, kind)) == expected
        assert found_guilty(layout, made_by(worker, kind), nothing) == expected, "once is enough"


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_make_is_the_models_own(kind):
    layout = pipelines((0, 1), (2, 3), (4, 5))
    assert found_guilty(layout, lambda at, microbatch, hop: at is kind) == []
    assert found_guilty(layout, lambda at, microbatch, hop: (at, microbatch) == (kind, 3)) == []


def test_nobody_is_accused_by_the_only_one():
    assert found_guilty(pipelines((0, 1), each=4), made_by(0, FORWARD)) == []
    # All paths lead through worker 3.
    assert found_guilty(pipelines((0, 3), (1, 3), each=4), made_by(3, FORWARD)) == []


def test_two_at_once():
    layout = pipelines((0, 1), (2, 3), (4, 5), (6, 7))
    assert found_guilty(layout, lambda at, m, hop: at is FORWARD and hop.worker in (1, 2)) == [1, 2]


def test_a_sum_that_is_too_large_in_one_place_only_is_nobodys_fault():
    """Others had the same in smaller sums, and still all of it together is too large."""
    from odyssey_megatron.execute.suspects import Inquiry, in_place, suspects

    layout = pipelines((0,), (1,), (2,))
    for finite, guilty in ((False, []), (True, [1])):
        inquiry = Inquiry(layout, suspects(layout, frozenset({(GRADIENT, 1, 0)})))
        moved = in_place(layout, inquiry.next_exchange())
        inquiry.hear(moved, suspects(moved, frozenset()), finite=finite)
        assert inquiry.guilty == guilty


def test_gradients_of_who_computes_nothing():
    """A shadow adds up nothing: what is there was not computed."""
    from odyssey_megatron.execute.suspects import Inquiry, suspects

    layout = Layout(holders=((0, 1), (0, 1)), routes=pipelines((0,)).routes)
    inquiry = Inquiry(layout, suspects(layout, frozenset({(GRADIENT, 1, 0)})))
    assert not inquiry.next_exchange()
    assert inquiry.guilty == [1]


def test_in_random_layouts():
    """Whoever is accused has made them, and who makes them and can be told is accused."""
    draw = random.Random(5)
    accused = 0
    for _ in range(200):
        stages, depth = draw.randint(1, 4), draw.randint(2, 4)
        workers = [[stage * depth + replica for replica in range(depth)] for stage in range(stages)]
        layout = pipelines(
            *(tuple(draw.choice(one) for one in workers) for _ in range(draw.randint(1, 5))),
            each=draw.randint(1, 4),
        )
        culprit, kind = draw.choice(layout.workers), draw.choice(KINDS)
        some = frozenset(
            draw.sample(range(layout.num_microbatches), draw.randint(1, layout.num_microbatches))
        )
        own = found_guilty(layout, lambda at, m, hop, some=some, kind=kind: at is kind and m in some)
        assert own == []
        found = found_guilty(layout, made_by(culprit, kind))
        assert found in ([], [culprit])
        accused += len(found)
    assert accused > 50
