"""Which of the signals that an agent receives count."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from odyssey_megatron.launch.process import signals
from odyssey_megatron.launch.process.signals import Received


@pytest.mark.parametrize(
    ("sent_s", "counted"),
    [
        ([0.0], 1),
        ([0.0, 0.1], 1),
        ([0.0, 0.4], 2),
        ([0.0, 0.2, 0.4], 2),  # whoever presses Ctrl-C again and again means it
        ([0.0, 0.2, 0.4, 0.6, 0.8], 3),
    ],
)
def test_signals_soon_after_one_that_counts_do_not(monkeypatch, sent_s, counted):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    with Received().handled([signal.SIGUSR1]) as received:
        for at_s in sent_s:
            clock.now_s = 100.0 + at_s
            signal.raise_signal(signal.SIGUSR1)
    assert received.take() == [signal.SIGUSR1] * counted
