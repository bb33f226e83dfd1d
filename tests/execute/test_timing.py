"""What is timed of a step: without what runs within an input gradient, and without what is waited for shared cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from odyssey_megatron.codec import from_json
from odyssey_megatron.execute import cores
from odyssey_megatron.execute.chronicle import Chronicle
from odyssey_megatron.execute.timing import Measurements, Trace
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.schedule import parse_instr
from odyssey_megatron.policy.costs.measured import Measured


class Told:
    """A member that keeps what it is to publish."""

    @property
    def reports(self) -> Told:
        return self

    def publish_observations(self, observations_json: str) -> None:
        self.measured = from_json(Measured, observations_json)


def test_how_long_a_step_takes_is_said_of_those_that_can_be_held_against_each_other(tmp_path):
    """While batches grow, steps are shorter than what the plan's simulation says; a generation's first is longer."""
    member, measurements = Told(), Measurements(1, lambda step: 1.0)
    chronicle = Chronicle(
        Journal(tmp_path, source="rank0"), member, measurements, on_commit=lambda *_: None, trace_steps=0
    )
    generation = SimpleNamespace(number=1, previous=None, planned=False)
    chronicle.begin(generation)
    for step in range(4):
        trace = measurements.trace(step)
        chronicle.ended(step, trace, 1.0 + step, dict, is_whole=step != 2)
    assert [(one.step, one.seconds) for one in member.measured.steps] == [(1, 2.0), (3, 4.0)]


class Ticks:
    """A second for each :meth:`pass_by`."""

    device = "cpu"

    def __init__(self) -> None:
        self.now = 0

    def pass_by(self, seconds: int) -> None:
        self.now += seconds

    def mark(self) -> int:
        return self.now

    def between_s(self, began: int, ended: int) -> float:
        return float(ended - began)


def test_the_end_of_a_measured_step_is_told_behind_the_next_one():
    """By then no device is still at it."""
    clock = Ticks()
    measurements = Measurements(2, lambda step: 1.0, stopwatch=clock)
    for step in range(7):
        trace = measurements.trace(step)
        with trace.agreeing():
            clock.pass_by(50)
        with trace.stepping():
            clock.pass_by(3 + step)
        if trace.measured:
            told = from_json(Measured, measurements.with_step(step, trace, {}, None, 12)).ends
    assert [(one.step, one.optimizer_s, one.optimizer_bytes) for one in told] == [
        (0, 3.0, 12),
        (1, 4.0, 12),
        (2, 5.0, 12),
        (4, 7.0, 12),
    ]
    assert all(0 <= one.agreement_s < 1 for one in told), "by the clock on the wall"


def test_what_runs_within_an_input_gradient_is_not_counted_to_it():
    clock = Ticks()
    trace = Trace(measured=True, stopwatch=clock)
    outer, inner, summed = map(parse_instr, ("I3[0:4]", "W3[2:4]", "REDUCE_GRAD[2:4]"))
    with trace.span(outer), trace.computing(outer):
        clock.pass_by(2)
        with trace.apart(), trace.span(inner), trace.computing(inner):
            clock.pass_by(5)
        clock.pass_by(1)
        with trace.apart(), trace.span(summed):
            clock.pass_by(7)
        clock.pass_by(3)
    assert trace.compute_s() == {outer: 6.0, inner: 5.0}
    assert [instr for instr, _, _ in trace.entries] == [outer, inner, summed]


@pytest.mark.parametrize(
    ("times", "seen"),
    [
        (
            [(2, 5), (4, 9), (6, 14), (8, 18), (10, 23)],
            (pytest.approx(1.4826 / 3), pytest.approx(1.0, abs=0.01)),
        ),
        ([(10, 20), (11, 19), (10, 21), (9, 20), (10, 20)], (0.0, pytest.approx(-0.5))),
        ([(10, 20), (10, 21), (10, 19), (10, 20), (10, 20)], None),
        ([(2, 5), (4, 9), (6, 14)], None),
    ],
    ids=["long in both directions", "noise", "all alike", "too few"],
)
def test_how_unlike_the_microbatches_of_a_step_are(times, seen):
    clock = Ticks()
    measurements = Measurements(1, lambda step: 1.0, stopwatch=clock)
    trace = measurements.trace(0)
    for number, took in enumerate(times):
        for text, seconds in zip(("F{}[0:4]", "B{}[0:4]"), took, strict=True):
            with trace.computing(parse_instr(text.format(number))):
                clock.pass_by(seconds)
    told = from_json(Measured, measurements.with_step(0, trace, {})).uneven
    assert [(one.spread, one.together) for one in told] == ([seen] if seen else [])


def test_what_is_not_measured_is_not_timed():
    trace = Trace(measured=False, stopwatch=Ticks())
    outer = parse_instr("I3[0:4]")
    with trace.span(outer), trace.computing(outer), trace.apart():
        pass
    assert trace.compute_s() == {}


def compute(ranks: int, parent: Connection) -> None:
    """As one of so many ranks of a node, all on one core, until the parent says that it is enough, and longer than its
    turns are. Tells (seconds by its own clock, by that on the wall that counts, by that on the wall).
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    trace = Measurements(1, lambda step: 1.0).trace(0)
    instr = parse_instr("F0[0:1]")
    began_s, least_s = time.monotonic(), time.thread_time() + 0.3
    with trace.computing(instr):
        parent.send("begins")
        while not parent.poll() or time.thread_time() < least_s:
            pass
    parent.send((trace.compute_s()[instr], trace.wall_s, time.monotonic() - began_s))


def computed(count: int, ranks: int, stopped_s: float = 0.0) -> list[tuple[float, float, float]]:
    """What ``count`` processes that compute at once tell, the first of them stopped for so long."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=compute, args=(ranks, theirs)) for _, theirs in pipes]
    try:
        for one in processes:
            one.start()
        for ours, _ in pipes:
            assert ours.recv() == "begins"
        if stopped_s:
            os.kill(processes[0].pid, signal.SIGSTOP)
            os.waitpid(processes[0].pid, os.WUNTRACED)  # it stops once it has a core
            time.sleep(stopped_s)
            os.kill(processes[0].pid, signal.SIGCONT)
        for ours, _ in pipes:
            ours.send("enough")
        return [ours.recv() for ours, _ in pipes]
    finally:
        for one in processes:
            one.kill()
            one.join()


@pytest.mark.skipif(cores.queued() is None, reason="this kernel does not say what a thread waits for a core")
def test_what_is_waited_for_cores_that_ranks_share_is_nobodys_fault():
    for own_s, counted_s, wall_s in computed(3, ranks=3):
        assert wall_s > 1.5 * own_s, "three on one core"
        assert counted_s < 1.2 * own_s
    for own_s, counted_s, wall_s in computed(3, ranks=1):
        assert wall_s > 1.5 * own_s
        assert counted_s > 1.5 * own_s, "who has a core of its own has lost it to something else"


@pytest.mark.parametrize("ranks", [1, 3])
def test_who_is_stopped_has_lost_its_processor(ranks):
    if ranks > 1 and cores.queued() is None:
        pytest.skip("this kernel does not say what a thread waits for a core")
    ((own_s, counted_s, _),) = computed(1, ranks, stopped_s=0.5)
    assert counted_s - own_s > 0.45


def test_where_the_kernel_does_not_say_it_nobody_is_judged_on_cores_that_are_shared(monkeypatch):
    monkeypatch.setattr(cores, "_SCHEDSTAT", "/proc/nothing")
    step = Measurements(1, lambda step: 1.0).trace(0)
    for ranks, judged in ((1, 1), (10_000, 0)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        told = from_json(Measured, Measurements(1, lambda step: 1.0).with_step(0, step, {}))
        assert len(told.held) == judged
