"""A Megatron-LM script whose tokenizer of numbers may be cut within them; with ``by-sample`` its data sets for filling
in the middle draw for each sample anew, as under ``--odyssey``.

odyssey run ... tests/megatron_lm/middle.py [by-sample] pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.training.datasets.fim_dataset import GPTFIMDataset

from odyssey_megatron.mcore.model.rng import derive_seed


def draw_by_sample() -> None:
    original = GPTFIMDataset.__getitem__

    def drawn(self: Any, sample: int) -> Any:
        self.np_rng.seed(derive_seed(self.config.random_seed, sample) % 2**32)
        return original(self, sample)

    GPTFIMDataset.__getitem__ = drawn


if __name__ == "__main__":
    del sys.argv[0]
    NullTokenizer.text_to_ids = lambda self, text: [int(one) for one in text.split()]
    if sys.argv[0] == "by-sample":
        del sys.argv[0]
        draw_by_sample()
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
