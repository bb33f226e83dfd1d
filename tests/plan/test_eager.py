"""Forwards that are run ahead: where they may stand, what they cost, and that the step is none the longer for them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.layout import layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.placing.redundancy import with_shadows
from odyssey_megatron.plan.schedule import parse_instr, schedule_from_text
from odyssey_megatron.plan.scheduling.eager import eager_forwards
from odyssey_megatron.plan.scheduling.generate import build_schedule
from odyssey_megatron.plan.scheduling.resume import BEGINS, usable
from odyssey_megatron.plan.scheduling.visits import Visits
from odyssey_megatron.policy.routes.rerouting import failover_targets, reroute
from tests.plan.samples import eager_schedule, uniform_costs

COSTS = uniform_costs(8, ends=True, message_s=0.01)
ONE_NODE = dict.fromkeys(range(4), 0)
PP4 = with_shadows(
    megatron_layout(num_layers=10, pipeline_size=4, num_workers=4, num_microbatches=8),
    None, ONE_NODE, 2, COSTS, eager=True,
)  # fmt: skip
PP2_DP2 = megatron_layout(num_layers=10, pipeline_size=2, num_workers=4, num_microbatches=8)
PP2_DP4 = megatron_layout(num_layers=10, pipeline_size=2, num_workers=8, num_microbatches=16)
LAYOUTS = {"PP4": PP4, "PP2-DP2": PP2_DP2, "PP2-DP4": PP2_DP4}


def test_the_shadow_is_the_worker_before():
    assert PP4.holders == ((0, 3),) * 3 + ((0, 1),) * 2 + ((1, 2),) * 2 + ((2, 3),) * 3


def test_the_shadow_is_on_another_node_all_the_same():
    nodes = {0: 0, 1: 0, 2: 1, 3: 1}
    layout = megatron_layout(num_layers=10, pipeline_size=4, num_workers=4, num_microbatches=8)
    shadowed = with_shadows(layout, None, nodes, 2, COSTS, eager=True)
    assert all(len({nodes[worker] for worker in holders}) == 2 for holders in shadowed.holders)
    assert shadowed.holders[0] == (0, 3)
    assert shadowed.holders[5] == (1, 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_bubbles_are_filled(name):
    layout = LAYOUTS[name]
    plain = build_schedule(layout, COSTS)
    schedule, filled = eager_schedule(layout, COSTS)
    assert filled.forwards
    verify(layout, schedule, COSTS)
    before, after = simulate(plain, layout, COSTS), simulate(schedule, layout, COSTS)
    times = {
        (worker, instr): span
        for (worker, program), (_, spans) in zip(schedule.programs, after.spans, strict=True)
        for instr, span in zip(program, spans, strict=True)
    }
    for (worker, program), (_, spans) in zip(plain.programs, before.spans, strict=True):
        for instr, span in zip(program, spans, strict=True):
            assert times[worker, instr] == pytest.approx(span), "everything else is when it was"
    assert {(one.routed, one.worker) for one in filled.forwards} <= {
        (worker, target) for worker in layout.workers for target in layout.workers if target != worker
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_those_run_ahead_to_whom_the_work_would_go(name):
    layout = LAYOUTS[name]
    for one in eager_schedule(layout, COSTS)[1].forwards:
        after = reroute(layout, set(layout.workers) - {one.routed}, COSTS)
        (route,) = (route for route in after.routes if one.microbatch in route.microbatches)
        assert any(
            hop.worker == one.worker and hop.first <= one.first and one.last <= hop.last for hop in route.hops
        )


def test_text_and_integers_say_the_same():
    schedule, filled = eager_schedule(PP4, COSTS)
    assert str(parse_instr("E3[4:8]")) == "E3[4:8]"
    assert schedule_from_text(schedule.to_text()) == schedule
    visits = Visits(PP4)
    codes = visits.encode(schedule)
    assert codes == filled.programs
    assert tuple((w, visits.decode(program)) for w, program in codes.items()) == schedule.programs
    found = eager_forwards(schedule, PP4, COSTS)
    assert [(one.worker, one.routed, one.microbatch) for one in found] == [
        (one.worker, one.routed, one.microbatch) for one in filled.forwards
    ]
    assert [one.end_s for one in found] == pytest.approx([one.end_s for one in filled.forwards])


def test_their_activations_stay_until_the_end():
    schedule, filled = eager_schedule(PP4, COSTS)
    peaks = dict(
        simulate(schedule, PP4, replace(COSTS, keeps_messages=True, message_bytes=100)).activation_bytes
    )
    mine = [one for one in filled.forwards if one.worker == 0]
    assert peaks[0] >= len(mine) * (2 + 100)


def test_memory_binds():
    plain = dict(simulate(build_schedule(PP4, COSTS), PP4, COSTS).activation_bytes)
    schedule, filled = eager_schedule(PP4, COSTS, room={worker: peak + 4 for worker, peak in plain.items()})
    after = dict(simulate(schedule, PP4, COSTS).activation_bytes)
    assert all(after[worker] <= plain[worker] + 4 for worker in plain)
    assert 0 < len(filled.forwards) < len(eager_schedule(PP4, COSTS)[1].forwards)
    assert filled.no_memory > 0
    assert re.match(r"\d+ of 32 forwards run ahead, \d+ without memory, \d+ without a bubble", str(filled))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_run_ahead_fits_beside_what_the_next_instruction_frees(name):
    """In the bubble before an input gradient what that frees is still there."""
    layout = LAYOUTS[name]
    costs = replace(
        COSTS, layers=tuple(replace(one, activation_bytes=5, early_bytes=2) for one in COSTS.layers)
    )
    peaks = simulate(build_schedule(layout, costs), layout, costs).activation_bytes
    for spare in range(0, 40, 4):
        room = {worker: size + spare for worker, size in peaks}
        verify(layout, eager_schedule(layout, costs, room=room)[0], costs, in_flight_cap=room)


def test_what_has_run_early_saves_the_most():
    forwards = eager_schedule(PP4, COSTS)[1].forwards
    step_s = simulate(build_schedule(PP4, COSTS), PP4, COSTS).step_s
    first, *_, last = (one for one in forwards if one.routed == 0)
    assert 0 < last.saves_s(step_s) < first.saves_s(step_s) < first.end_s - first.start_s


def test_without_another_holder_nothing_is_run_ahead():
    alone = megatron_layout(num_layers=10, pipeline_size=4, num_workers=4, num_microbatches=8)
    assert not failover_targets(alone, COSTS)
    assert eager_schedule(alone, COSTS)[1].no_input == 32


SMALL = layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0, 1)),))
SMALL = replace(SMALL, holders=((0, 1), (0, 1), (0, 1), (0, 1)))
GOOD = build_schedule(SMALL, uniform_costs(4)).to_text()
WRONG = {
    "twice": ("I0[0:2]", "E0[2:4] E0[2:4] I0[0:2]", "run ahead twice"),
    "by the worker itself": ("I0[0:2]", "E0[0:2] I0[0:2]", "is no other holder"),
    "before its input": ("F0[0:2]", "E0[2:4] F0[0:2]", "without its input"),
    "without its input": ("F0[0:2]", "E1[2:4] F0[0:2]", "without its input"),
    "other layers": ("I0[0:2]", "E0[2:3] I0[0:2]", "no worker computes microbatch 0 through these"),
    "behind a reduction": ("STEP", "E0[2:4] STEP", "run ahead behind a reduction"),
}


@pytest.mark.parametrize("name", WRONG)
def test_verify_finds(name):
    old, new, message = WRONG[name]
    first, second = GOOD.splitlines()
    with pytest.raises(ScheduleInvalid, match=message):
        verify(SMALL, schedule_from_text(f"{first.replace(old, new, 1)}\n{second}"))


def test_verify_passes_what_is_right():
    first, second = GOOD.splitlines()
    first, second = first.replace("I0[0:2]", "E0[2:4] I0[0:2]", 1), second.replace("1: ", "1: E1[0:2] ")
    verify(SMALL, schedule_from_text(f"{first}\n{second}"))


def test_only_a_holder_runs_ahead():
    lonely = layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0, 1)),))
    text = build_schedule(lonely, uniform_costs(4)).to_text()
    with pytest.raises(ScheduleInvalid, match="no other holder"):
        verify(lonely, schedule_from_text(text.replace("1: ", "1: E1[0:2] ")))


def test_usable_is_what_the_new_plan_gives_to_who_has_it():
    after = reroute(PP4, {0, 1, 3}, COSTS)
    rows = {0: [0, 0, 0, BEGINS + 1, 1, 0, 0, 0, 0, 0]}
    ahead = [(0, 5, 7), (3, 5, 7), (1, 0, 3), (2, 7, 10)]
    assert usable(after, 1, rows, ahead) == [(0, 5, 7), (3, 5, 7)]
    assert usable(after, 3, rows, ahead[:3]) == [], "the first stage is alive"
    rows[3] = [0, 0, 0, 0, 0, BEGINS + 1, 1, 0, 0, 0]
    assert usable(after, 1, rows, ahead) == [(0, 5, 7)], "done by itself already"
    assert usable(after, 1, rows, [(0, 5, 6)]) == [], "in the middle of a model chunk"
