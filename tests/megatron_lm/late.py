"""A Megatron-LM script that one rank begins late, by so many seconds: its processor, or its file system, is slow.

odyssey run ... tests/megatron_lm/late.py RANK SECONDS pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import sys
import time

if __name__ == "__main__":
    _, rank, seconds, *sys.argv = sys.argv
    if os.environ["RANK"] == rank:
        time.sleep(float(seconds))
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
