"""A Megatron-LM script whose rank 3 is killed while it is about to dispatch tokens to experts, and so is rank 0, which
stands there for a second.

odyssey run ... tests/megatron_lm/dispatching.py NUMBER pretrain_gpt.py ... --odyssey

NUMBER: of the dispatch, counted from 1.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
import time
from typing import Any

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

if __name__ == "__main__":
    _, number, *sys.argv = sys.argv
    dispatch, numbers = MoEAlltoAllTokenDispatcher.token_dispatch, itertools.count(1)

    def slowly(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == int(number):
            if os.environ["RANK"] == "3":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(os.environ["RANK"] == "0")
        return dispatch(*args, **kwargs)

    MoEAlltoAllTokenDispatcher.token_dispatch = slowly
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
