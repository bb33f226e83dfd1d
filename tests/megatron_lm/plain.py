"""Plain Megatron-LM on the CPU, nothing of Odyssey in it but the device: what losses are compared with.

python -m torch.distributed.run --nproc-per-node 4 tests/megatron_lm/plain.py pretrain_gpt.py ...
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from odyssey_megatron.mcore.cpu import device as cpu_device


def load_without_apex() -> None:
    """Megatron's distributed optimizer writes to float32 parameters, when it loads, as if it were training. With
    torch's Adam, which it takes where there is neither Apex nor Transformer Engine, it also asks for states before
    there are any, and loads no counters of steps.
    """
    import torch
    from megatron.core import optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    is_torch_s = optimizer.USING_PYTORCH_OPTIMIZER

    state_dict, load_state_dict = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict
    fill = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_states(self: Any) -> Any:
        if not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return state_dict(self)

    def fill_but_counters(self: Any, parameter: Any, tensors: Any) -> None:
        with torch.no_grad():
            fill(self, parameter, {"step": torch.zeros(()), **tensors} if is_torch_s else tensors)

    def with_counters(self: Any, loaded: Any) -> None:
        load_state_dict(self, loaded)
        for one in self.optimizer.state.values():
            one["step"] = torch.tensor(float(loaded["optimizer"]["param_groups"][0]["step"]))

    if is_torch_s:
        DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict = with_states, with_counters
    DistributedOptimizer._set_main_param_and_optimizer_states = fill_but_counters


if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    cpu_device.install()
    cpu_device.prepare_training()
    if {"--load", "--use-distributed-optimizer"} <= {*sys.argv}:
        load_without_apex()
    runpy.run_path(sys.argv[0], run_name="__main__")
