"""A Megatron-LM script of which one rank loads from another folder: its node has a file system of its own.

odyssey run ... tests/megatron_lm/elsewhere.py RANK FOLDER pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    _, rank, folder, *sys.argv = sys.argv
    if os.environ["RANK"] == rank:
        sys.argv += ["--load", folder]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
