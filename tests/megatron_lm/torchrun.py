"""The other door: a checkout with Odyssey's lines in it, started by torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from odyssey_megatron import patch
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import MODEL, MegatronJobs, MegatronRun


def patched(checkout: Path, folder: Path) -> Path:
    """A copy of ``checkout`` after ``odyssey patch install``."""
    copy = folder / "patched"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "tests", "docs"))
    patch.write(patch.install(copy))
    return copy


def run(jobs: MegatronJobs, folder: Path, flags: str, *, ranks: int, stages: int, inject: str) -> MegatronRun:
    """``torchrun pretrain_gpt.py ... --odyssey`` in a patched copy of the checkout of ``jobs``."""
    copy, run_dir = patched(jobs.checkout, folder), folder / "run"
    flags += (
        f" --pipeline-model-parallel-size {stages} --data-cache-path {folder / 'cache'} --odyssey recover"
    )
    flags += f" --odyssey-run-dir {run_dir} --odyssey-inject {inject}"
    environ = {
        **os.environ,
        "ODYSSEY_DEVICE": "cpu",
        "ODYSSEY_PRELOAD": "tests.megatron_lm.preload",  # of the copy: the ranks are forked from it
        "MEGATRON_LM_PATH": str(copy),
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(copy / "pretrain_gpt.py"), *MODEL.split(), *flags.split()],
        cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
    )  # fmt: skip
    return MegatronRun(exit_code=done.returncode, run_dir=run_dir, log=done.stdout)
