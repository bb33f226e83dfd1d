"""A Megatron-LM script that believes to have the Transformer Engine that --log-max-attention-logit asks for; attention
on a CPU measures as much. With ``alone``, in 32 bits, too, where Megatron-LM looks for a wrapper that is not there.

odyssey run ... tests/megatron_lm/logits.py [alone] pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import sys
from types import SimpleNamespace
from typing import Any

from megatron.training import arguments, training

if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0] == "alone":
        del sys.argv[0]
        clip_qk = training.clip_qk

        def clip_in_32_bits(model: Any, **kwargs: Any) -> Any:
            wrapped = [SimpleNamespace(module=SimpleNamespace(module=chunk.module)) for chunk in model]
            return clip_qk(wrapped, **kwargs)

        training.clip_qk = clip_in_32_bits
    asked = arguments.is_te_min_version

    def is_there(version: str, *args: Any, **kwargs: Any) -> bool:
        return version == "2.9.0" or asked(version, *args, **kwargs)

    arguments.is_te_min_version = is_there
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
