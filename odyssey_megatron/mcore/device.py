"""Chooses the device, before anything of Megatron is imported."""

from __future__ import annotations

import os

import torch

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ConfigError


def install(config: OdysseyConfig) -> None:
    """Redirect Megatron to the CPU, or select this rank's GPU. Raises ConfigError if the rank has no GPU of its own,
    and may not share one.
    """
    if config.device == "cpu":
        from odyssey_megatron.mcore.cpu import device as cpu_device

        cpu_device.install()
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count or (config.uses_nccl and count <= local_rank):
        raise ConfigError(
            f"--odyssey-device cuda: this process needs GPU {local_rank}, torch sees {count}. Start fewer ranks a "
            "node, let them share GPUs with --odyssey-backend gloo, or try it without GPUs with --odyssey-device cpu."
        )
    torch.cuda.set_device(local_rank % count)


def sharing(config: OdysseyConfig) -> int:
    """The largest number of ranks that share a GPU of this node."""
    if config.uses_nccl:
        return 1
    return -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.cuda.device_count())
