"""Each kind of corruption of a good schedule is found, at its place."""

import re

import pytest

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.schedule import schedule_from_text
from odyssey_megatron.plan.scheduling.generate import build_schedule
from tests.plan.samples import uniform_costs

LAYOUT = layout_from_routes(
    4,
    (
        pipeline_route((0, 2), (2, 4), (0, 2)),
        pipeline_route((1, 3), (2, 4), (1, 3)),
    ),
)
COSTS = uniform_costs(4)
GOOD = build_schedule(LAYOUT, COSTS).to_text()
"""
0: F0[0:2] SEND_F0[2]>2 RECV_B0[2]<2 F2[0:2] SEND_F2[2]>2 I0[0:2] RECV_B2[2]<2 W0[0:2] I2[0:2] W2[0:2] ...
2: RECV_F0[2]<0 F0[2:4] I0[2:4] SEND_B0[2]>0 RECV_F2[2]<0 W0[2:4] F2[2:4] I2[2:4] SEND_B2[2]>0 W2[2:4] ...
"""

CORRUPTIONS = {
    "forward missing": (
        "0",
        "F0[0:2] ",
        "",
        "microbatch 0 is not|before what they depend|not computed|sent before",
    ),
    "forward twice": ("0", "F2[0:2] ", "F2[0:2] F2[0:2] ", r"layer\(s\) \[0, 1\] twice"),
    "input gradient missing": ("2", "I2[2:4] ", "", "sent before it is computed"),
    "weight gradient missing": ("2", "W2[2:4] ", "", r"microbatch 2: W is missing for layer\(s\) \[2, 3\]"),
    "weight before input gradient": ("0", "I2[0:2] W2[0:2]", "W2[0:2] I2[0:2]", "before what they depend on"),
    "fused and split": ("0", "W2[0:2]", "B2[0:2]", "twice"),
    "wrong worker": ("0", "F0[0:2]", "F1[0:2]", "not routed through these layers here"),
    "wrong layers": ("2", "F0[2:4]", "F0[1:4]", "not routed through these layers here"),
    "send missing": ("0", "SEND_F2[2]>2 ", "", "channel 0>2: message 1"),
    "send to the wrong worker": ("0", "SEND_F2[2]>2", "SEND_F2[2]>3", "nothing crosses so"),
    "send too early": ("0", "F0[0:2] SEND_F0[2]>2", "SEND_F0[2]>2 F0[0:2]", "sent before it is computed"),
    "send twice": ("0", "SEND_F0[2]>2", "SEND_F0[2]>2 SEND_F0[2]>2", "twice on channel SEND_F 0>2"),
    "receive missing": ("2", "RECV_F2[2]<0 ", "", "its input was not received"),
    "receive twice": ("2", "RECV_F2[2]<0", "RECV_F2[2]<0 RECV_F2[2]<0", "twice"),
    "receive too late": ("2", "RECV_F0[2]<0 F0[2:4]", "F0[2:4] RECV_F0[2]<0", "not received before"),
    "receives swapped": (
        "2",
        "RECV_F0[2]<0 F0[2:4] I0[2:4] SEND_B0[2]>0 RECV_F2[2]<0",
        "RECV_F2[2]<0 RECV_F0[2]<0 F0[2:4] I0[2:4] SEND_B0[2]>0",
        "channel 0>2: message 0",
    ),
    "reduction missing": ("1", "REDUCE_GRAD[0:2] ", "", r"blocks \[\(0, 2\)\] not reduced"),
    "reduction twice": ("1", "REDUCE_GRAD[0:2]", "REDUCE_GRAD[0:2] REDUCE_GRAD[0:2]", "reduced twice"),
    "reduction of another block": ("1", "REDUCE_GRAD[0:2]", "REDUCE_GRAD[2:4]", "no block of this worker"),
    "reduction too early": (
        "1",
        "W3[0:2] REDUCE_GRAD[0:2]",
        "REDUCE_GRAD[0:2] W3[0:2]",
        "after the reduction of its block",
    ),
    "step missing": ("3", " STEP", "", "must end with STEP"),
    "step twice": ("3", " STEP", " STEP STEP", "must come last"),
}


def corrupted(worker, old, new):
    lines = dict(line.split(": ", 1) for line in GOOD.splitlines())
    assert old in lines[worker], lines[worker]
    lines[worker] = lines[worker].replace(old, new, 1)
    return schedule_from_text("\n".join(f"{w}: {program}" for w, program in lines.items()))


def test_the_original_passes():
    assert verify(LAYOUT, schedule_from_text(GOOD), COSTS).step_s == 2 * 8


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruption_is_found(name):
    worker, old, new, message = CORRUPTIONS[name]
    with pytest.raises(ScheduleInvalid) as caught:
        verify(LAYOUT, corrupted(worker, old, new))
    assert re.search(message, str(caught.value)), caught.value


def test_what_hangs_on_one_hardware_queue_is_found():
    """All sends buffered, as the clock has them, it ends. But each second message of a channel waits for the first: 0
    cannot go on before 1 has room for microbatch 2, which comes behind its second gradient, for which 0 has no room.
    """
    layout = layout_from_routes(2, (pipeline_route((0, 1), (1, 2), (0, 1, 2, 3)),))
    costs = uniform_costs(2)
    sending = " ".join(f"F{m}[0:1] SEND_F{m}[1]>1" for m in range(4))
    back = " ".join(f"RECV_B{m}[1]<1 I{m}[0:1] W{m}[0:1]" for m in range(4))
    answering = " ".join(f"RECV_F{m}[1]<0 F{m}[1:2] I{m}[1:2] SEND_B{m}[1]>0 W{m}[1:2]" for m in range(4))
    text = f"0: {sending} {back} REDUCE_GRAD[0:1] STEP\n1: {answering} REDUCE_GRAD[1:2] STEP"
    simulate(schedule_from_text(text), layout, costs)
    with pytest.raises(ScheduleInvalid, match=r"worker 0, .* »SEND_F3\[1\]>1« .*one queue"):
        verify(layout, schedule_from_text(text), costs)
    first, second, third = (f"RECV_F{m}[1]<0 " for m in range(3))
    roomy = text.replace(second, "").replace(third, "").replace(first, first + second + third)
    verify(layout, schedule_from_text(roomy), costs)


def test_deadlock_is_found():
    """Both ends wait: worker 0 wants the gradient of 0 before it sends 2; worker 2 wants 2 first."""
    text = {
        0: "F0[0:2] SEND_F0[2]>2 RECV_B0[2]<2 I0[0:2] W0[0:2] F2[0:2] SEND_F2[2]>2 RECV_B2[2]<2 I2[0:2] W2[0:2] "
        "REDUCE_GRAD[0:2] STEP",
        2: "RECV_F0[2]<0 RECV_F2[2]<0 F2[2:4] F0[2:4] I0[2:4] SEND_B0[2]>0 I2[2:4] SEND_B2[2]>0 W0[2:4] W2[2:4] "
        "REDUCE_GRAD[2:4] STEP",
    }
    lines = dict(line.split(": ", 1) for line in GOOD.splitlines())
    lines |= {str(worker): program for worker, program in text.items()}
    schedule = schedule_from_text("\n".join(f"{w}: {program}" for w, program in lines.items()))
    with pytest.raises(ScheduleInvalid, match=r"deadlock: .* worker 0 waits at position 3 for I0\[0:2\]"):
        verify(LAYOUT, schedule)


def test_reductions_in_two_orders_deadlock():
    layout = layout_from_routes(2, (pipeline_route((0,), (2,), (0,)), pipeline_route((1,), (2,), (1,))))
    layout = type(layout)(holders=((0, 1), (0, 1, 2)), routes=layout.routes).check()
    good = build_schedule(layout, uniform_costs(2)).to_text()
    verify(layout, schedule_from_text(good))
    lines = good.splitlines()
    first, second = "W1[1:2] REDUCE_GRAD[1:2]", "W1[0:1] REDUCE_GRAD[0:1]"
    lines[1] = lines[1].replace(f"{first} {second}", f"{second} {first}")
    with pytest.raises(ScheduleInvalid, match="deadlock"):
        verify(layout, schedule_from_text("\n".join(lines)))


def test_memory_is_checked():
    with pytest.raises(ScheduleInvalid, match="worker 0 keeps 4 bytes of activations, allowed are 3"):
        verify(LAYOUT, schedule_from_text(GOOD), COSTS, in_flight_cap={0: 3, 1: 4, 2: 4, 3: 4})


def test_missing_worker():
    with pytest.raises(ScheduleInvalid, match="programs of workers"):
        verify(LAYOUT, schedule_from_text("\n".join(GOOD.splitlines()[:-1])))
