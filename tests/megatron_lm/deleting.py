"""A Megatron-LM script whose rank 0 is killed while it deletes the checkpoint of iteration 2: one file is gone then.

odyssey run ... tests/megatron_lm/deleting.py pretrain_gpt.py ... --odyssey
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    del sys.argv[0]
    delete = shutil.rmtree

    def killed(path: Any, *args: Any, **kwargs: Any) -> None:
        if "iter_0000002" in Path(path).name and os.environ["RANK"] == "0":
            (Path(path) / "metadata.json").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        delete(path, *args, **kwargs)

    shutil.rmtree = killed
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
