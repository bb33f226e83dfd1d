"""``python -m odyssey_megatron.mcore.entry SCRIPT ...``: runs a Megatron-LM script with Odyssey in it, unedited."""

from __future__ import annotations

import os
import runpy
import sys

from odyssey_megatron.mcore import autoload


def main() -> None:
    """Run the script that the arguments name, as the interpreter would."""
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    autoload.before_megatron()
    autoload.import_training()
    autoload.after_training()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
