"""A Megatron-LM script whose ranks 0 and 1 are killed while they write indices of the data, and leave half a file: the
last one of a set, and the first one of the next set.

odyssey run ... tests/megatron_lm/building.py pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

import numpy

DIES = {"0": "train-shuffle_index", "1": "valid-document_index"}

if __name__ == "__main__":
    del sys.argv[0]
    save = numpy.save

    def killed(path: Any, *args: Any, **kwargs: Any) -> None:
        save(path, *args, **kwargs)
        if DIES.get(os.environ["RANK"], "no index") in str(path):
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    numpy.save = killed
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
