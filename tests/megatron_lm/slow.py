"""A Megatron-LM script on a disk that takes so long for each file of a checkpoint.

odyssey run ... tests/megatron_lm/slow.py SECONDS pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

if __name__ == "__main__":
    _, seconds, *sys.argv = sys.argv
    write = FileSystemWriterAsync.write_preloaded_data

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(float(seconds))
        return write(*args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(slowly)
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
