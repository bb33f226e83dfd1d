"""One rank's worth of Megatron on the CPU, in the test process: no messages are sent."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.launch.jobserver import CHECKOUT


@pytest.fixture(scope="session")
def megatron() -> Any:
    """Megatron on the CPU device, with a cell of one rank; gives its process groups."""
    from odyssey_megatron.mcore import cpu_preload  # isort: skip  # noqa: F401 - the device comes first
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from odyssey_megatron.mcore import float64, groups, rng, span, wgrad

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    collection = groups.initialize()
    rng.initialize(1)
    wgrad.install()
    span.install()
    float64.install()
    sys.path.insert(0, str(CHECKOUT / "examples" / "llama"))
    yield collection
    dist.destroy_process_group()


@pytest.fixture
def spec(megatron: Any) -> Callable[..., Any]:
    """The example's model in float64: ``spec(num_layers=2, ...)``."""
    import pretrain_llama

    def make(**changes: Any) -> Any:
        values = {
            "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
            "seq_length": 16, "attention_dropout": 0.0, "hidden_dropout": 0.0, "bf16": False, "lr": 1e-3,
            "min_lr": 1e-4, "weight_decay": 0.1, "clip_grad": 1.0, "seed": 7,
        }  # fmt: skip
        return pretrain_llama.model_spec(argparse.Namespace(**(values | changes)), float64=True)

    return make
