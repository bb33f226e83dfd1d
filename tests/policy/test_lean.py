"""Of plans that are hardly slower, the one that needs least memory; and how much slower is the user's to say."""

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.checking.simulate import simulate, step_end_s
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.placing.memory import caps_for, minimum_bytes
from odyssey_megatron.plan.scheduling.lean import leaner
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.studies.presets import GIB
from odyssey_megatron.studies.whatif import main_plan
from tests.plan.samples import preset_profile

PROFILE = preset_profile("llama2-7b", "h100")
STATE = initial_state(nodes=tuple(worker // 8 for worker in range(32)))
DEAD = apply(STATE, RankDied(rank=5, code=-9, cause="killed", t_s=0.0))
JOB = JobSpec(
    num_layers=34, pipeline_model_parallel_size=4, tensor_model_parallel_size=1, num_microbatches=64,
    tokens_per_step=1, train_steps=1, optimizer_copies=2,
)  # fmt: skip


def fullest(plan):
    return max(size for _, size in plan.peak_bytes)


def started(share, **more):
    return initial_plan(replace(JOB, slower_for_memory=share, **more), STATE, PROFILE)


def after_a_loss(share, healthy):
    job = replace(JOB, slower_for_memory=share)
    config = OdysseyConfig(horizon_s=1e9, mtbf_s=1e9)
    return decide(job=job, state=DEAD, previous=healthy, profile=PROFILE, config=config, now_s=0.0)


def test_what_is_hardly_slower_needs_less_memory():
    plans = {share: started(share, num_microbatches=128) for share in (0.0, 0.002, 0.03, 0.1)}
    fast = plans[0.0]
    for share, plan in plans.items():
        assert plan.step_s <= fast.step_s * (1 + share)
        assert plan.layout == fast.layout
        verify(plan.layout, plan.schedule)
        timeline = simulate(plan.schedule, plan.layout, PROFILE.costs, {})
        assert timeline.step_s == pytest.approx(plan.step_s, rel=1e-6)
        assert dict(timeline.peak_bytes) == dict(plan.peak_bytes), "what is said is what it needs"
    peaks = [fullest(plan) for plan in plans.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] < peaks[0] - 4 * GIB, "for nothing"
    assert peaks[3] < 0.7 * peaks[0]


def test_a_layout_that_needs_much_less_is_taken_if_it_is_hardly_slower():
    """The fastest layout, and one whose stages lie one after the other: whose memory is less, for 5 % or more."""
    fast, own = started(0.0, best_layout=True), started(0.0)
    share = own.step_s / fast.step_s - 1
    assert share > 0.03
    near = started(share + 0.02, best_layout=True)
    assert near.step_s <= fast.step_s * (1 + share + 0.02)
    assert fullest(near) < fullest(own), "as little as that of the slower layout at the least"
    assert fullest(near) < 0.9 * fullest(started(0.002, best_layout=True))


def test_after_a_loss_nobody_waits_for_a_little_memory():
    healthy = started(0.0)
    fast, little, much = (after_a_loss(share, healthy) for share in (0.0, 0.002, 0.1))
    assert little.plan == fast.plan
    assert much.best.step_s == fast.best.step_s, "layouts are compared by what they can do"
    assert much.candidates == fast.candidates
    assert much.plan.step_s <= 1.1 * fast.plan.step_s
    assert fullest(much.plan) < 0.9 * fullest(fast.plan)
    assert much.plan == after_a_loss(0.1, healthy).plan, "the same arguments, the same plan"


def test_an_order_with_less_memory_keeps_to_it():
    layout = started(0.0).layout
    costs = PROFILE.costs
    caps = caps_for(layout, costs)
    order = order_routes(layout, costs, in_flight_cap=caps)
    step_s = step_end_s(layout, costs, order.done_s, order.tails())
    found = leaner(order, layout, costs, caps, longest_s=1.03 * step_s)
    assert found is not None
    new, new_s = found
    assert new_s == step_end_s(layout, costs, new.done_s, new.tails()) <= 1.03 * step_s
    assert new.schedule() != order.schedule()
    assert leaner(order, layout, costs, caps, longest_s=0.9 * step_s) is None, "nothing is that fast"
    floor = minimum_bytes(layout, costs)
    tight = order_routes(layout, costs, in_flight_cap=floor)
    assert leaner(tight, layout, costs, floor, longest_s=1e9) is None, (
        "of one microbatch there is nothing to save"
    )


def test_plan_says_what_less_memory_would_cost(capsys):
    flags = "--cluster 4x8 --model llama2-7b --use-distributed-optimizer --width 0".split()
    assert main_plan(flags) == 0
    usual = capsys.readouterr().out
    assert "memory for speed, by --odyssey-slower-for-memory-percent: 0: " in usual
    assert main_plan([*flags, "--odyssey-slower-for-memory-percent", "10"]) == 0
    slower = capsys.readouterr().out
    gib = [float(text.split("fullest GPU ")[1].split(" GiB")[0]) for text in (usual, slower)]
    assert gib[1] < 0.8 * gib[0]
