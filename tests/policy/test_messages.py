"""Messages are kept for a step that may be interrupted where that costs less memory than it is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.policy import planner as planner_module
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.messages import planned_with_or_without
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.plan.samples import layer, uniform_costs

STATE = initial_state(nodes=(0,) * 8)
JOB = JobSpec(
    num_layers=10, pipeline_model_parallel_size=4, tensor_model_parallel_size=1, num_microbatches=16,
    tokens_per_step=16, train_steps=10, revisits=False,
)  # fmt: skip


def profile(room):
    """Of two pipelines of four workers. The first one's two layers take 8 bytes, and a microbatch of them 2. Eight
    microbatches have as many messages each way, and those in the middle of a pipeline twice as many.
    """
    one = replace(layer(1.0, 1.0, 1.0, 1), weight_bytes=1, gradient_bytes=1, optimizer_bytes=2)
    found = uniform_costs(8, ends=True)
    layers = (found.layers[0], *(one,) * 8, found.layers[-1])
    return Profile(costs=replace(found, layers=layers, message_bytes=1, memory_bytes=room), group_build_s=0.0)


def started(room, **config):
    planner = PolicyPlanner(OdysseyConfig(device="cpu", **config))
    return planner, planner.start(JOB, STATE, to_json(profile(room))).plan


def left_of(*dead):
    state = STATE
    for rank in dead:
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=0.0))
    return state


@pytest.mark.parametrize(("room", "keeps"), [(16, False), (60, True), (None, True)])
def test_a_job_keeps_them_if_they_fit(room, keeps):
    planner, plan = started(room)
    assert plan.keeps_messages is keeps
    assert planner.decide(left_of(0), plan, 1.0).plan.keeps_messages is keeps
    assert not started(room, interrupted_step="redo")[1].keeps_messages


@pytest.mark.parametrize(("room", "dead"), [(32, (0, 5)), (32, (0, 2, 4, 6)), (34, (0, 3, 5))])
def test_a_loss_with_which_they_would_cost_too_much_is_mended_without(room, dead, caplog):
    """Steps took up to twice as long."""
    planner, plan = started(room)
    assert plan.keeps_messages
    found = planner.decide(left_of(*dead), plan, 1.0)
    assert not found.plan.keeps_messages
    assert "messages are not kept" in caplog.text
    _, whole = started(40)
    enough = started(40)[0].decide(left_of(*dead), whole, 1.0).plan
    assert enough.keeps_messages
    assert found.last.step_s == enough.step_s
    assert planner.decide(STATE, found.plan, 2.0).plan.keeps_messages, "as the first plan did, which is back"


def test_the_next_loss_is_looked_at_before_it_happens():
    planner, plan = started(32)
    assert planner.decide(left_of(0), plan, 0.1).plan.step_s == 69.0
    planner.rehearse(STATE, plan, 0.5)
    found = planner.decide(left_of(0), plan, 1.0).plan
    assert (found.step_s, found.keeps_messages) == (64.0, False)


def test_what_a_rehearsal_found_to_pay_is_not_looked_at_once_more(monkeypatch):
    """With four microbatches steps are long whatever memory there is; a rehearsal has found plans without messages no
    better with half of the workers, which have most state each.
    """
    decided = []
    monkeypatch.setattr(planner_module, "decide", lambda **given: decided.append(given) or decide(**given))
    few = replace(JOB, num_microbatches=4)
    planner = PolicyPlanner(OdysseyConfig(device="cpu"))
    plan = planner.start(few, STATE, to_json(profile(40))).plan
    before = planner.decide(left_of(0, 5), plan, 0.1).plan
    assert len(decided) == 2
    planner.rehearse(STATE, plan, 0.5)
    decided.clear()
    assert planner.decide(left_of(0, 5), plan, 1.0).plan == before
    assert len(decided) == 1


def test_what_a_rehearsal_found_not_to_pay_is_done_without_at_once(monkeypatch):
    """A job whose single losses are mended with messages, and where three are dead better without."""
    decided = []
    monkeypatch.setattr(planner_module, "decide", lambda **given: decided.append(given) or decide(**given))
    planner, plan = started(35)
    before = planner.decide(left_of(0, 3, 5), plan, 0.1).plan
    assert len(decided) == 2
    planner, plan = started(35)
    planner.rehearse(STATE, plan, 0.5)
    decided.clear()
    found = planner.decide(left_of(0, 3, 5), plan, 1.0).plan
    assert (found, len(decided)) == (before, 1)
    assert not found.keeps_messages


def test_they_must_save_more_than_they_cost():
    """A failure without them costs half a step; one an hour is worth a thousandth of a step of 7.2 s."""
    (_, plan), given = started(60), profile(60)
    given = replace(given, costs=replace(given.costs, keeps_messages=True))
    full = replace(plan, step_s=7.2, peak_bytes=((0, 60),))

    def made(kept_s):
        def make(profile):
            return replace(full, step_s=kept_s) if profile.costs.keeps_messages else full

        return planned_with_or_without(make, given, mtbf_s=3600.0)[1].costs.keeps_messages

    assert made(7.2)
    assert made(7.2 * 1.0015)
    assert not made(7.2 * 1.0025)

    def half_empty(profile):
        assert profile.costs.keeps_messages, "nothing is looked at twice where memory does not bind"
        return replace(full, peak_bytes=((0, 30),))

    assert planned_with_or_without(half_empty, given, mtbf_s=3600.0)[1] is given


def test_nothing_fits():
    given = profile(7)
    given = replace(given, costs=replace(given.costs, keeps_messages=True))

    def make(_):
        raise PlanInfeasible("too large")

    with pytest.raises(PlanInfeasible):
        planned_with_or_without(make, given, mtbf_s=3600.0)


def test_where_nobody_is_left_it_is_the_loss_that_is_told():
    planner, plan = started(60)
    with pytest.raises(LayersLost):
        planner.decide(left_of(*range(8)), plan, 1.0)
