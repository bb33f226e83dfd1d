"""Plain Megatron-LM that loads several checkpoints, a fork for each, and trains on from there.

python tests/megatron_lm/loads.py 2,4,6 pretrain_gpt.py --load FOLDER ...
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from odyssey_megatron.mcore import cpu_device

if __name__ == "__main__":
    _, steps, *sys.argv = sys.argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    cpu_device.install()
    cpu_device.prepare_training()
    from megatron.training import get_args, training

    load = training.load_checkpoint

    def load_each(*given: Any, **named: Any) -> Any:
        *others, last = map(int, steps.split(","))
        for step in others:
            if (pid := os.fork()) == 0:
                get_args().ckpt_step = step
                return load(*given, **named)
            if status := os.waitpid(pid, 0)[1]:
                sys.exit(f"iteration {step}: status {status}")
        get_args().ckpt_step = last
        return load(*given, **named)

    training.load_checkpoint = load_each
    runpy.run_path(sys.argv[0], run_name="__main__")
