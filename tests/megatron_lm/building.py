"""A Megatron-LM script whose ranks 0 and 1 are killed while they build an index of the data: the first and the second
one.

odyssey run ... tests/megatron_lm/building.py pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

if __name__ == "__main__":
    del sys.argv[0]
    build = GPTDataset._build_document_sample_shuffle_indices

    def killed(self: Any) -> Any:
        if dist.get_rank() == 0 and (os.environ["RANK"], self.index_split) in (
            ("0", Split.train),
            ("1", Split.valid),
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        return build(self)

    GPTDataset._build_document_sample_shuffle_indices = killed
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
