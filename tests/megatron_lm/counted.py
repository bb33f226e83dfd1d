"""A Megatron-LM script whose steps count as so many floating point operations each, so that its throughput has digits.

odyssey run ... tests/megatron_lm/counted.py OPERATIONS pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from megatron.training import training

if __name__ == "__main__":
    _, operations, *sys.argv = sys.argv

    def counted(args: Any, batch_size: int) -> float:
        return float(operations)

    training.num_floating_point_operations = counted
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
