"""For ``odyssey run --preload odyssey_megatron.mcore.cpu.preload``: imports everything that a rank on the CPU needs.

The launcher imports this once and forks its ranks from it, which saves each of them seconds.
"""

# ruff: noqa: E402, F401 - the redirect must come first, and importing is all that this does
from odyssey_megatron.mcore.cpu import device as cpu_device

cpu_device.install()

import megatron.core.datasets.blended_megatron_dataset_builder
import megatron.core.datasets.gpt_dataset
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.models.gpt.gpt_model
import torch._dynamo  # takes a second or two, which the first optimizer would pay
from torch.testing._internal.distributed.fake_pg import FakeStore

import odyssey_megatron.mcore.plugin
