"""What Megatron asks of a device, answered by the CPU."""

from __future__ import annotations

import torch

from odyssey_megatron.mcore.cpu import device as cpu_device

cpu_device.install()


def test_memory_is_that_of_the_process():
    """Names as in ``--log-memory-to-tensorboard`` and ``--log-device-memory-used`` (megatron/training/training.py)."""
    stats = torch.cuda.memory_stats()
    assert stats["reserved_bytes.all.current"] == stats["allocated_bytes.all.current"] > 1e7
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"]
    assert stats["allocation.all.current"] == 0
    assert torch.cuda.device_memory_used() > 1e7
