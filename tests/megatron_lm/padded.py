"""A Megatron-LM script whose conversations are padded as for so many context-parallel ranks, be there one alone.

odyssey run ... tests/megatron_lm/padded.py RANKS pretrain_gpt.py ... --sft
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from megatron.training.datasets.sft_dataset import SFTDataset

if __name__ == "__main__":
    _, ranks, *sys.argv = sys.argv
    original = SFTDataset.__getitem__

    def padded(self: Any, sample: int) -> Any:
        self.config.context_parallel_size = int(ranks)
        return original(self, sample)

    SFTDataset.__getitem__ = padded
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
