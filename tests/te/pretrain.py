"""``examples/llama/pretrain_llama.py`` with Transformer Engine's layers, where ``tests.te.on_cpu`` is preloaded."""

import runpy
import sys

from tests.launch.jobserver import CHECKOUT
from tests.te import layers

layers.use()
example = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
sys.path.insert(0, str(example.parent))
runpy.run_path(str(example), run_name="__main__")
