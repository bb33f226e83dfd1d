import pytest

from odyssey_megatron.errors import LayoutInvalid, PlanInfeasible
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.layout import (
    Hop,
    Layout,
    Route,
    layout_from_routes,
    megatron_layout,
    pipeline_route,
)
from odyssey_megatron.plan.placing.memory import activation_caps, one_f_one_b_bytes
from odyssey_megatron.plan.schedule import COMPUTE, Op, schedule_from_text
from odyssey_megatron.plan.scheduling.generate import build_schedule, independent, order_routes
from tests.plan.samples import uniform_costs


def pipelines(stages, replicas, microbatches):
    """One layer a stage; worker = stage * replicas + replica, as Megatron places them."""
    return layout_from_routes(
        stages,
        tuple(
            pipeline_route(
                tuple(stage * replicas + replica for stage in range(stages)),
                tuple(range(1, stages + 1)),
                tuple(range(replica * microbatches, (replica + 1) * microbatches)),
            )
            for replica in range(replicas)
        ),
    )


def computes(schedule, worker):
    return " ".join(f"{i.op.value}{i.microbatch}" for i in schedule.program(worker) if i.op in COMPUTE)


def test_uniform_pipeline_is_one_f_one_b():
    schedule = build_schedule(pipelines(4, 1, 8), uniform_costs(4))
    assert computes(schedule, 0) == (
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    )
    assert computes(schedule, 3) == (
        "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4 F5 I5 W5 F6 I6 W6 F7 I7 W7"
    )


def test_messages_stand_where_the_interpreter_needs_them():
    schedule = build_schedule(pipelines(2, 1, 2), uniform_costs(2))
    assert schedule.to_text().splitlines() == [
        "0: F0[0:1] SEND_F0[1]>1 RECV_B0[1]<1 F1[0:1] SEND_F1[1]>1 I0[0:1] RECV_B1[1]<1 W0[0:1] I1[0:1] "
        "W1[0:1] REDUCE_GRAD[0:1] STEP",
        "1: RECV_F0[1]<0 F0[1:2] I0[1:2] SEND_B0[1]>0 RECV_F1[1]<0 W0[1:2] F1[1:2] I1[1:2] SEND_B1[1]>0 "
        "W1[1:2] REDUCE_GRAD[1:2] STEP",
    ]


def test_the_last_weight_gradients_fill_the_drain():
    layout, costs = pipelines(4, 1, 8), uniform_costs(4)
    timeline = simulate(build_schedule(layout, costs), layout, costs)
    fused = (8 + 4 - 1) * 3
    assert timeline.step_s == 30 < fused


@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 3), (2, 4), (4, 16)])
def test_default_memory_is_that_of_one_f_one_b(replicas, microbatches):
    layout, costs = pipelines(4, replicas, microbatches), uniform_costs(4)
    caps = one_f_one_b_bytes(layout, costs)
    assert sorted(set(caps.values())) == sorted({min(microbatches, k) for k in (1, 2, 3, 4)})
    verify(layout, build_schedule(layout, costs), costs, in_flight_cap=caps)


def test_more_memory_is_used_and_not_exceeded():
    layout, costs = pipelines(4, 1, 8), uniform_costs(4)
    caps = activation_caps(layout, costs, budget_bytes=4 + 4)  # four of state, four microbatches
    schedule = build_schedule(layout, costs, in_flight_cap=caps)
    timeline = verify(layout, schedule, costs, in_flight_cap=caps)
    assert timeline.step_s < 30
    assert max(size for _, size in timeline.peak_bytes) == 8


def test_text_round_trip():
    schedule = build_schedule(pipelines(3, 2, 4), uniform_costs(3))
    assert schedule_from_text(schedule.to_text()) == schedule


def test_deterministic_and_equal_pipelines_get_equal_orders():
    layout = pipelines(3, 2, 4)
    schedule = build_schedule(layout, uniform_costs(3))
    assert build_schedule(layout, uniform_costs(3)) == schedule
    assert computes(schedule, 0).replace("0", "4").replace("1", "5").replace("2", "6").replace(
        "3", "7"
    ) == computes(schedule, 1)


def test_holders_without_microbatches_still_reduce():
    base = pipelines(2, 1, 2)
    layout = Layout(holders=((0, 5), (1, 5)), routes=base.routes).check()
    schedule = build_schedule(layout, uniform_costs(2))
    assert schedule.to_text().splitlines()[-1] == "5: REDUCE_GRAD[1:2] REDUCE_GRAD[0:1] STEP"


def test_a_worker_visited_twice_never_deadlocks():
    """Worker 0 is first and last stage: shallow visits must leave room for the deep ones."""
    hops = (
        Hop(worker=0, first=0, last=1),
        Hop(worker=1, first=1, last=2),
        Hop(worker=0, first=2, last=3),
    )
    layout = layout_from_routes(3, (Route(microbatches=tuple(range(6)), hops=hops),))
    costs = uniform_costs(3)
    for room in (2, 3, 5):
        caps = {0: room, 1: room}
        schedule = build_schedule(layout, costs, in_flight_cap=caps)
        verify(layout, schedule, costs, in_flight_cap=caps)


def test_two_hops_in_a_row_on_one_worker_are_refused():
    hops = (Hop(worker=0, first=0, last=1), Hop(worker=0, first=1, last=2))
    layout = layout_from_routes(2, (Route(microbatches=(0,), hops=hops),))
    with pytest.raises(LayoutInvalid, match="must be one hop"):
        build_schedule(layout, uniform_costs(2))


def test_too_little_memory_names_the_need():
    with pytest.raises(PlanInfeasible, match="worker 0 may keep 0 bytes .* at least 1"):
        build_schedule(pipelines(1, 1, 1), uniform_costs(1), in_flight_cap={0: 0})


def test_slow_worker_is_timed_at_its_speed():
    layout, costs = pipelines(1, 1, 4), uniform_costs(1)
    assert order_routes(layout, costs, speeds={0: 0.5}).done_s == {0: 24.0}


def test_routes_that_share_a_worker_are_one_group():
    layout = pipelines(3, 3, 2)
    assert [len(group) for group in independent(layout.routes)] == [1, 1, 1]
    crossing = Route(
        microbatches=(9,),
        hops=(layout.routes[0].hops[0], layout.routes[2].hops[1], layout.routes[0].hops[2]),
    )
    assert [len(group) for group in independent((*layout.routes, crossing))] == [3, 1]


def test_megatron_layout_schedules():
    layout = megatron_layout(num_layers=10, pipeline_size=4, num_workers=8, num_microbatches=8)
    costs = uniform_costs(8, ends=True)
    timeline = verify(layout, build_schedule(layout, costs), costs)
    assert timeline.step_s == 3 * 6 + 4 * 4 + 2
    assert {i.op for _, p in build_schedule(layout, costs).programs for i in p} >= {Op.REDUCE_GRAD, Op.STEP}
