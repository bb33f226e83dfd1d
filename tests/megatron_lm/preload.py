"""What the jobs of these tests import: the agent's modules, and Megatron-LM of the checkout MEGATRON_LM_PATH."""

# ruff: noqa: E402, F401 - the checkout must be found first, and importing is all that this does
import os
import sys
import typing

import typing_extensions

from odyssey_megatron.mcore.cpu import device as cpu_device  # isort: skip - the CPU device comes before Megatron

if not hasattr(typing, "override"):  # Python 3.11: Megatron-LM asks for 3.12 from core_v0.17.1 on
    typing.override = typing_extensions.override

sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])
cpu_device.install()
cpu_device.prepare_training()

import gpt_builders
import megatron.training
import model_provider
import torch._dynamo
import torch.testing._internal.distributed.fake_pg
import torch.utils.tensorboard

import odyssey_megatron.mcore.loop.door
import odyssey_megatron.policy.decide
import tests.launch.preload
