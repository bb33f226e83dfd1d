"""``python -m odyssey_megatron`` is ``odyssey``."""

import sys

from odyssey_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
