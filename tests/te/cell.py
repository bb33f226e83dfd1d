"""``tests/mcore/cell.py`` with Transformer Engine's layers: ``python -m tests.te.cell FOLDER CASES``."""

import tests.te.on_cpu  # isort: skip  # noqa: F401 - before Megatron
import json
import sys
from pathlib import Path

from tests.launch.jobserver import CHECKOUT
from tests.mcore import cell
from tests.te import layers

if __name__ == "__main__":
    sys.path.insert(0, str(CHECKOUT / "examples" / "llama"))
    import pretrain_llama

    layers.use()
    layers.offer_latent_attention(pretrain_llama)
    cell.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
