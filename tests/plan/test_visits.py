"""Programs as integers say what the instructions say, and are checked as strictly."""

from dataclasses import replace

import pytest

from odyssey_megatron.errors import LayoutInvalid, ScheduleInvalid
from odyssey_megatron.plan.checking.verify import verify, verify_codes
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes, pipeline_route
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.schedule import schedule_from_text
from odyssey_megatron.plan.scheduling.assemble import assemble
from odyssey_megatron.plan.scheduling.generate import build_schedule, order_routes
from odyssey_megatron.plan.scheduling.programs import Programs
from odyssey_megatron.plan.scheduling.visits import Visits
from tests.plan.samples import uniform_costs

LAYOUT = layout_from_routes(
    4, (pipeline_route((0, 2), (2, 4), (0, 2)), pipeline_route((1, 2, 3), (1, 2, 4), (1, 3)))
)
COSTS = uniform_costs(4)


def test_integers_and_instructions_are_the_same_programs():
    schedule, visits = build_schedule(LAYOUT, COSTS), Visits(LAYOUT)
    codes = visits.encode(schedule)
    assert tuple((worker, visits.decode(program)) for worker, program in codes.items()) == schedule.programs
    assert verify_codes(visits, codes, COSTS) == verify(LAYOUT, schedule, COSTS)


def test_the_text_of_a_plan_is_that_of_its_schedule():
    order = order_routes(LAYOUT, COSTS)
    assert assemble(order, LAYOUT, COSTS).programs.text() == build_schedule(LAYOUT, COSTS).to_text()


def test_an_integer_on_another_worker_is_found():
    visits = Visits(LAYOUT)
    codes = visits.encode(build_schedule(LAYOUT, COSTS))
    codes[3].insert(0, codes[0][0])
    with pytest.raises(
        ScheduleInvalid, match="worker 3, position 0: .* not routed through these layers here"
    ):
        verify_codes(visits, codes)


def test_a_hop_is_computed_in_one_piece():
    text = build_schedule(LAYOUT, COSTS).to_text().replace("F0[0:2]", "F0[0:1] F0[1:2]")
    with pytest.raises(ScheduleInvalid, match="not routed through these layers here"):
        verify(LAYOUT, schedule_from_text(text))


def test_a_route_with_a_gap_is_refused():
    hops = (Hop(worker=0, first=0, last=1), Hop(worker=1, first=2, last=3))
    with pytest.raises(LayoutInvalid, match="does not go on"):
        Visits(Layout(holders=((0,), (0,), (1,)), routes=(Route(microbatches=(0,), hops=hops),)))


@pytest.mark.parametrize("wrong", [{"cuts": (4,)}, {"cuts": (-1,)}, {"keepers": ((0,),) * 4}])
def test_cuts_and_keepers_of_layers_that_are_not_there_are_refused(wrong):
    hops = (Hop(worker=0, first=0, last=3),)
    layout = Layout(holders=((0,),) * 3, routes=(Route(microbatches=(0,), hops=hops),))
    with pytest.raises(LayoutInvalid, match="do not go with 3 layers"):
        replace(layout, **wrong).check()


def test_a_worker_finds_its_own_program_alone():
    whole = build_schedule(LAYOUT, COSTS)
    plan = Plan(
        policy="initial",
        layout=LAYOUT,
        programs=Programs.from_text(whole.to_text()),
        transfers=(),
        step_s=1.0,
        bound_s=1.0,
        transition_s=0.0,
        peak_bytes=(),
    )
    assert {worker: plan.program(worker) for worker, _ in whole.programs} == dict(whole.programs)
    assert plan.program(max(LAYOUT.workers) + 1) == ()
    assert replace(plan, programs=Programs.from_text("")).program(0) == ()
