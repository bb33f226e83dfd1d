"""A Megatron-LM script whose Megatron is another than Odyssey knows.

odyssey run ... tests/megatron_lm/changed.py MODULE:NAME gone|changed pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

if __name__ == "__main__":
    _, target, how, *sys.argv = sys.argv
    module, _, name = target.partition(":")
    if how == "gone":
        delattr(importlib.import_module(module), name)
    else:
        setattr(importlib.import_module(module), name, lambda something, other: None)
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
