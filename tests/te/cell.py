"""``tests/mcore/cell.py`` with Transformer Engine's layers: ``python -m tests.te.cell FOLDER CASES``."""

import tests.te.on_cpu  # isort: skip  # noqa: F401 - before Megatron
import json
import sys
from pathlib import Path

from tests.mcore import cell
from tests.te import layers

if __name__ == "__main__":
    layers.use()
    cell.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
