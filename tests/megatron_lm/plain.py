"""Plain Megatron-LM on the CPU, nothing of Odyssey in it but the device: what losses are compared with.

python -m torch.distributed.run --nproc-per-node 4 tests/megatron_lm/plain.py pretrain_gpt.py ...
"""

from __future__ import annotations

import os
import runpy
import sys

from odyssey_megatron.mcore import cpu_device

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    cpu_device.install()
    cpu_device.prepare_training()
    runpy.run_path(sys.argv[0], run_name="__main__")
