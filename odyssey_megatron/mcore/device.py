"""Choosing the device, before anything of Megatron is imported."""

from __future__ import annotations

import os

import torch

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ConfigError


def install(config: OdysseyConfig) -> None:
    """Redirects Megatron to the CPU, or selects this rank's GPU. Raises ConfigError if there is none."""
    if config.device == "cpu":
        from odyssey_megatron.mcore import cpu_device

        cpu_device.install()
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available() or torch.cuda.device_count() <= local_rank:
        raise ConfigError(
            f"--odyssey-device cuda: this process needs GPU {local_rank}, torch sees {torch.cuda.device_count()}. "
            "Start fewer ranks a node, or try it without GPUs with --odyssey-device cpu."
        )
    torch.cuda.set_device(local_rank)
