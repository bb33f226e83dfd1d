"""One rank's worth of Megatron on the CPU, in the test process: no messages are sent."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from odyssey_megatron.plan.placing.slices import EVERYTHING
from tests.launch.jobserver import CHECKOUT

SCHEDULE = {
    "init_lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-3, "lr_warmup_steps": 4, "lr_decay_steps": 40,
    "lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 40, "wd_incr_style": "constant",
}  # fmt: skip
"""Megatron's, counted in samples."""
MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "seq_length": 16, "attention_dropout": 0.0, "hidden_dropout": 0.0, "bf16": False, "fp16": False, "lr": 1e-3,
    "min_lr": 1e-4, "weight_decay": 0.1, "clip_grad": 1.0, "seed": 7, "tensor_model_parallel_size": 1,
    "context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None,
    "moe_token_dispatcher_type": "alltoall",
    "sequence_parallel": False, "qk_layernorm": False, "optimizer": "adam", "sgd_momentum": 0.9,
    "share_embeddings_and_output_weights": False, "num_experts": None, "mtp_num_layers": None,
}  # fmt: skip
"""The example's flags."""


@pytest.fixture(scope="session")
def megatron() -> Any:
    """Megatron on the CPU device, with a cell of one rank; gives its process groups."""
    from odyssey_megatron.mcore.cpu import preload  # isort: skip  # noqa: F401 - the device comes first
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from odyssey_megatron.mcore.model import float64, groups, rng, span, wgrad

    # What another test has had Megatron compile before the device came is left as it is, too.
    torch.compiler.set_stance("force_eager")
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
        return pretrain_llama.model_spec(argparse.Namespace(**(MODEL | changes)), float64=True)

    return make


@pytest.fixture
def make_model(spec: Any, megatron: Any) -> Callable[..., Any]:
    """Worker 0 of two, which holds the other one's layers, the head among them, too; or ``alone``, which computes all.
    ``config``: changes of Megatron's; other arguments as of ``spec``.
    """
    import pretrain_llama
    import torch

    from odyssey_megatron.mcore.loop.data import MicrobatchSource
    from odyssey_megatron.mcore.model.model import MegatronModel
    from odyssey_megatron.mcore.model.optimizer import LearningRate
    from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route

    samples = [
        {"tokens": torch.arange(i, i + 16) % 11, "labels": torch.arange(i, i + 16) % 7} for i in range(64)
    ]
    for one in samples:
        one |= {"loss_mask": torch.ones(16), "position_ids": torch.arange(16)}

    def make(*, alone: bool = False, config: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Any:
        wanted = spec(**changes)
        for name, value in config.items():
            setattr(wanted.config, name, value)
        last, tied = wanted.num_layers, wanted.shares_embedding
        made = MegatronModel(
            wanted,
            forward_step=pretrain_llama.forward_step,
            source=MicrobatchSource(samples, micro_batch_size=1),
            learning_rate=LearningRate(**SCHEDULE),
            num_microbatches=2,
            seq_length=16,
            micro_batch_size=1,
            groups_of_cell=megatron,
        )
        if alone:
            layout = layout_from_routes(last, (pipeline_route((0,), (last,), (0, 1)),), tied=tied)
        else:
            layout = layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0, 1)),))
            layout = replace(layout, holders=((0,), (0,), (0, 1), (0, 1)))
        made.holdings.create_layers(range(last + tied), dict.fromkeys(range(last + tied), (EVERYTHING,)))
        made.take_layout(layout, 0)
        made.begin_step(0)
        return made

    return make


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    """As ``make_model``, as it is."""
    return make_model()
