"""A job of Megatron-LM in processes of its own, as benchmarks time it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def run(arguments: Sequence[str], folder: Path, *, ranks: int) -> tuple[int, str]:
    """(exit code, what it has printed) of ``ranks`` ranks on the CPU device; ``arguments``: the script and its own."""
    command = [sys.executable, "-m", "odyssey_megatron", "run", "--nproc-per-node", str(ranks)]
    command += ["--preload", "tests.megatron_lm.preload", *arguments]
    env = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(CHECKOUT),
        "PYTHONWARNINGS": "ignore", "ODYSSEY_DEVICE": "cpu",
    }  # fmt: skip
    log = folder / "log"
    with log.open("w") as file:
        code = subprocess.run(command, env=env, stdout=file, stderr=file, check=False).returncode
    return code, log.read_text()
