"""A Megatron-LM script that believes to have the Transformer Engine that --log-max-attention-logit asks for; attention
on a CPU measures as much.

odyssey run ... tests/megatron_lm/logits.py pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from megatron.training import arguments

if __name__ == "__main__":
    del sys.argv[0]
    asked = arguments.is_te_min_version

    def is_there(version: str, *args: Any, **kwargs: Any) -> bool:
        return version == "2.9.0" or asked(version, *args, **kwargs)

    arguments.is_te_min_version = is_there
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
