from dataclasses import replace

from odyssey_megatron.cluster.state import initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from tests.policy.test_decide import PROFILE, check, job


def with_slow(*slow):
    """(layout before, decision, that among drains alone) of two stages in three pipelines."""
    spec, state = job(2), initial_state(nodes=(0,) * 6)
    before = initial_plan(spec, state, PROFILE)
    workers = tuple(replace(w, speed=0.3 if w.worker in slow else 1.0) for w in state.workers)
    of = {
        "job": spec, "state": replace(state, workers=workers), "previous": before, "profile": PROFILE,
        "config": OdysseyConfig(), "now_s": 1.0,
    }  # fmt: skip
    return before.layout, decide(**of), lambda: decide(**of, among={"drain"})


def test_the_slow_pipeline_is_left():
    before, decision, drained = with_slow(1)
    slow = next(route for route in before.routes if route.hops[0].worker == 1)
    plan = drained().plan
    check(plan, {0, 2, 3, 4, 5})
    assert plan.policy == "drain"
    assert plan.transfers == ()
    computing = {hop.worker for route in plan.layout.routes for hop in route.hops}
    assert computing == set(before.workers) - {hop.worker for hop in slow.hops}
    assert set(plan.layout.workers) - computing == {slow.hops[1].worker}, "who is fast stays up to date"
    least_s = {row.name: row.step_s for row in decision.candidates}
    assert least_s["drain"] <= plan.step_s * (1 + 1e-12) < least_s["keep"]


def test_every_pipeline_is_slow():
    _, decision, _ = with_slow(0, 1, 2)
    row = next(row for row in decision.candidates if row.name == "drain")
    assert (row.score, row.reason) == (None, "every pipeline has a slow worker")
    assert decision.plan.policy != "drain"
