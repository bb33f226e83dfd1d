"""A Megatron-LM script on a disk that loses the last byte of a file of a checkpoint.

odyssey run ... tests/megatron_lm/lossy.py ITERATION pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from odyssey_megatron.mcore.loop import saving

if __name__ == "__main__":
    _, iteration, *sys.argv = sys.argv
    damage = saving.damage

    def lose_a_byte(folder: Path) -> list[str]:
        if f"iter_{int(iteration):07d}" in folder.name:
            file = min(folder.glob("*.distcp"))
            os.truncate(file, file.stat().st_size - 1)
        return damage(folder)

    saving.damage = lose_a_byte
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
