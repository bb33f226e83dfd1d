"""All at once, or one by one: programs are found to be in order by both, or by neither."""

import random

import pytest

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.checking import verify
from odyssey_megatron.plan.checking.heads import heads_in_order
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.scheduling.messages import with_turns
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.plan.scheduling.reductions import buckets, with_reductions
from odyssey_megatron.plan.scheduling.visits import Visits
from odyssey_megatron.policy.routes.rerouting import reroute
from odyssey_megatron.policy.shapes import ways
from tests.plan.samples import uniform_costs

COSTS = uniform_costs(6, message_s=0.1)
TWO = layout_from_routes(
    6,
    (
        pipeline_route((0, 1, 2), (2, 4, 6), (0, 2, 4, 6)),
        pipeline_route((3, 4, 5), (2, 4, 6), (1, 3, 5, 7)),
    ),
)
TURNED = layout_from_routes(6, (ways.route((0, 1), (4, 6), ways.V, (0, 1, 2)),))
ALONE = layout_from_routes(6, (pipeline_route((0,), (6,), (0, 1)),))
LAYOUTS = {
    "pipelines": TWO,
    "one dead": reroute(TWO, (0, 1, 2, 3, 5), COSTS),
    "turned": TURNED,
    "one stage": ALONE,
}


def lowered(layout):
    visits = Visits(layout, buckets(layout, COSTS))
    order = order_routes(layout, COSTS)
    programs, turns = with_turns(visits.encode(order.schedule()), visits)
    return visits, with_reductions(programs, visits), turns


def worn(programs, random_):
    """``programs`` with one or two things wrong, most of the time."""
    found = {worker: list(program) for worker, program in programs.items()}
    for _ in range(random_.choice((1, 1, 2))):
        program, other = (found[random_.choice([*found])] for _ in range(2))
        at, to = random_.randrange(len(program)), random_.randrange(len(other))
        match random_.randrange(5):
            case 0:
                program[at - 1], program[at] = program[at], program[at - 1]
            case 1:
                program.insert(random_.randrange(len(program)), program.pop(at))
            case 2:
                program.pop(at)
            case 3:
                program.insert(at, other[to])
            case 4:
                program[at] = other[to]
        if not all(found.values()):
            return programs
    return found


def accepted(visits, programs, turns):
    try:
        return verify.verify_lowered(visits, programs, turns, COSTS, {})
    except ScheduleInvalid:
        return None


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_at_once_as_one_by_one(name, monkeypatch):
    visits, programs, turns = lowered(LAYOUTS[name])
    random_ = random.Random(name)
    cases = [(worn(programs, random_), turns) for _ in range(300)]
    # A promise about the order that is a lie is no proof of anything.
    cases += [(worn(programs, random_), random_.sample(turns, len(turns))) for _ in range(50)]
    at_once = [accepted(visits, *case) for case in cases]
    monkeypatch.setattr(verify, "heads_in_order", lambda *_: None)
    one_by_one = [accepted(visits, *case) for case in cases]
    assert at_once == one_by_one
    assert one_by_one.count(None) > 100
    assert len(one_by_one) - one_by_one.count(None) > 10


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_lowered_needs_no_second_look(name):
    visits, programs, turns = lowered(LAYOUTS[name])
    found = heads_in_order(visits, programs, COSTS, turns)
    assert found is not None
    assert found.queue
    assert found.peaks == dict(verify.verify_codes(visits, programs, COSTS).activation_bytes)
