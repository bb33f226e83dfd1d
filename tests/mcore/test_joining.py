"""What a new process of a Megatron-LM job takes over from those that started it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")


def test_time_counts_from_the_job_s_start(megatron, monkeypatch):
    """Not from the new process's: --exit-duration-in-mins is a limit for the job."""
    from odyssey_megatron.mcore.loop.joining import Start

    for name in ("megatron.training", module := "megatron.training.training"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    training: Any = sys.modules[module]
    monkeypatch.setattr(sys.modules["megatron.training"], "training", training, raising=False)
    notes: dict[str, str] = {}
    member: Any = SimpleNamespace(reports=SimpleNamespace(note=notes.__setitem__, noted=notes.get))
    counts = {"iteration": 0, "consumed_train_samples": 0, "skipped_train_samples": 0}
    args = SimpleNamespace(**counts, consumed_valid_samples=0, num_floating_point_operations_so_far=0)
    scheduler = SimpleNamespace(state_dict=dict)
    training._TRAIN_START_TIME = 1000.0
    Start.of(args, scheduler, []).note(member)
    training._TRAIN_START_TIME = 4600.0
    Start.noted(member).apply(args, scheduler, SimpleNamespace(take_over=lambda groups: None))
    assert training._TRAIN_START_TIME == 1000.0
