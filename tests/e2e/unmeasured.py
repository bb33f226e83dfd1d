"""A job whose ranks measure nothing: all its plans are by the profile that it is given.

odyssey run ... tests/e2e/unmeasured.py [pretrain_gpt.py] ...       # the example's without another script
"""

from __future__ import annotations

import os
import runpy
import sys

from odyssey_megatron.execute.timing import Measurements
from tests.e2e.jobs import SCRIPT

if __name__ == "__main__":
    Measurements.measures = lambda self, step: False  # type: ignore[method-assign]
    if sys.argv[1].endswith(".py"):
        del sys.argv[0]
    else:
        sys.argv[0] = str(SCRIPT)
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
