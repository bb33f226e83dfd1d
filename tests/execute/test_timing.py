"""What is timed of a step whose last input gradient others run within."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from odyssey_megatron.execute.timing import Trace
from odyssey_megatron.plan.schedule import parse_instr


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


def test_what_is_not_measured_is_not_timed():
    trace = Trace(measured=False, stopwatch=Ticks())
    outer = parse_instr("I3[0:4]")
    with trace.span(outer), trace.computing(outer), trace.apart():
        pass
    assert trace.compute_s() == {}
