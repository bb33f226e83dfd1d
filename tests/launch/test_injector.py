"""Fault injection: once, at the named point only; slowness, in the steps named."""

from __future__ import annotations

import signal

import pytest

from odyssey_megatron.execute import timing
from odyssey_megatron.execute.timing import Measurements
from odyssey_megatron.faults import parse_injections
from odyssey_megatron.launch.rank import injector
from odyssey_megatron.launch.rank.injector import Injector
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.plan.schedule import Instr, Op


@pytest.fixture
def sent(monkeypatch):
    signals = []
    monkeypatch.setattr(injector.os, "kill", lambda pid, number: signals.append(number))
    return signals


def armed(text, rank=1, journal=None):
    return Injector(parse_injections(text), rank, journal)


def test_the_named_point_of_the_named_step(sent):
    injector = armed("rank=1,step=3,at=forward")
    injector.at("forward", step=2, generation=1, microbatch=0)
    injector.at("backward", step=3, generation=1, microbatch=0)
    assert sent == []
    injector.at("forward", step=3, generation=1, microbatch=5)
    injector.at("forward", step=3, generation=2, microbatch=0)
    assert sent == [signal.SIGKILL], "once"


def test_microbatch_and_generation(sent):
    injector = armed("rank=1,step=3,at=forward,microbatch=2,signal=STOP;rank=1,step=3,at=groups,generation=2")
    injector.at("forward", step=3, generation=1, microbatch=1)
    injector.at("groups", step=3, generation=1)
    assert sent == []
    injector.at("forward", step=3, generation=1, microbatch=2)
    injector.at("groups", step=3, generation=2)
    assert sent == [signal.SIGSTOP, signal.SIGKILL]


def test_another_rank(sent):
    armed("rank=2,step=3,at=forward").at("forward", step=3, generation=1)
    assert sent == []


def test_it_is_written_down_before_the_signal(sent, tmp_path):
    armed("rank=1,step=3,at=reduce", journal=Journal(tmp_path, source="rank1", rank=1)).at(
        "reduce", step=3, generation=4
    )
    (event,) = read_journal(tmp_path)
    assert (event["event"], event["at"], event["signal"], event["step"], event["generation"]) == (
        "injected", "reduce", "KILL", 3, 4,
    )  # fmt: skip


def test_slow_from_a_step_until_another(sent, tmp_path):
    journal = Journal(tmp_path, source="rank1", rank=1)
    injector = armed(
        "rank=1,step=2,slow=3,until=4;rank=1,step=3,slow=2;rank=2,step=0,slow=9", journal=journal
    )
    assert [injector.slowness(step) for step in range(6)] == [1, 1, 3, 6, 2, 2]
    assert [(event["step"], event["slow"]) for event in read_journal(tmp_path)] == [(2, 3), (3, 6), (4, 2)]
    injector.at("forward", step=2, generation=1)
    assert sent == []


def test_each_fault_that_strikes_is_noted_by_its_number(sent, tmp_path):
    """Also where one slowness ends as another of the same factor begins, and where two faults are alike."""
    journal = Journal(tmp_path, source="rank1", rank=1)
    injector = armed(
        "rank=1,step=2,slow=3,until=4;rank=1,step=4,slow=3;rank=1,step=-1,at=reduce;rank=1,step=-1,at=reduce;"
        "link=1>0,step=3,slow=2;rank=1,step=5,at=commit;rank=1,step=3,at=reduce,incarnation=1;rank=2,step=3,at=reduce",
        journal=journal,
    )
    for step in range(5):
        injector.slowness(step)
        injector.slow_links(step)
    for step in range(3):
        injector.at("reduce", step=step, generation=1)
    assert journal.flush(5.0)
    noted = [(event["event"], event["faults"]) for event in read_journal(tmp_path)]
    assert noted == [
        ("slowed", [0]), ("link_slowed", [4]), ("slowed", [1]), ("injected", [2]), ("injected", [3]),
    ]  # fmt: skip


class Clock:
    """A thread's own time, which goes on as told, and a little with each reading."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        self.now_s += 1e-3
        return self.now_s


def test_what_is_slow_takes_so_many_times_the_time_of_its_thread(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, "thread_time", clock.read)

    def busy_s(slowness: float) -> float:
        trace = Measurements(1, lambda step: slowness).trace(0)
        with trace.computing(Instr(Op.FORWARD, 0, 0, 1)):
            clock.now_s += 1.0
        (took_s,) = trace.compute_s().values()
        return took_s

    assert busy_s(1.0) == pytest.approx(1.0, abs=0.01)
    assert busy_s(4.0) == pytest.approx(4.0, abs=0.01)
