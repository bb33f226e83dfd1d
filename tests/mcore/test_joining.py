"""What a new process of a Megatron-LM job takes over from those that started it."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")


@pytest.fixture
def training(megatron, monkeypatch):
    """Megatron's module of this name, where there is no Megatron-LM."""
    for name in ("megatron.training", module := "megatron.training.training"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["megatron.training"], "training", sys.modules[module], raising=False)
    return sys.modules[module]


def test_time_counts_from_the_job_s_start(training):
    """Not from the new process's: --exit-duration-in-mins is a limit for the job."""
    from odyssey_megatron.mcore.loop.joining import Start

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


@pytest.mark.parametrize("joined", [False, True])
def test_throughput_is_per_gpu_that_the_job_began_with(training, monkeypatch, joined):
    """Whichever rank logs it, 1e15 operations in 100 s on 4 GPUs, of which 3 are left; Megatron's formulas."""
    from odyssey_megatron.mcore.loop.progress_log import ProgressLog, since_start

    now_s = time.time()
    start: Any = SimpleNamespace(began_s=now_s - 100.0, floating_point_operations=5e14)
    args = SimpleNamespace(world_size=3, num_floating_point_operations_so_far=9e14 if joined else 5e14)
    monkeypatch.setattr(sys.modules["megatron.training"], "get_args", lambda: args, raising=False)
    training._TRAIN_START_TIME, so_far = start.began_s, 1.5e15
    before = (training._TRAIN_START_TIME, args.num_floating_point_operations_so_far)
    log = ProgressLog(joins=lambda: False, not_saved=lambda: "")

    def started_with_as_many() -> None:
        raise AssertionError("Should have seen at least one 'Starting job' entry with same world_size")

    with since_start(start, 4):
        done, elapsed_s = (
            so_far - args.num_floating_point_operations_so_far,
            now_s - training._TRAIN_START_TIME,
        )
        assert done / (elapsed_s * args.world_size) == pytest.approx(1e15 / 400.0, rel=1e-2)
        began, before_it = log.start_time(started_with_as_many)
        elapsed_s = now_s - began.timestamp()
        assert (so_far - before_it) / (elapsed_s * args.world_size) == pytest.approx(1e15 / 400.0, rel=1e-2)
    assert (training._TRAIN_START_TIME, args.num_floating_point_operations_so_far) == before
