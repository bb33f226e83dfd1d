"""``tests/gpu.sh`` where there is no GPU: its dry run, and what it says of what it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("megatron.core")

from odyssey_megatron.errors import ConfigError
from tests import gpu


def script(*argv):
    environ = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", str(gpu.CHECKOUT / "tests" / "gpu.sh"), *argv],
        capture_output=True, text=True, env=environ, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_dry_run_measures_one_job_and_says_what_is_left(tmp_path):
    done = script("--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| a kill, rerouted | 2 | stall " in done.stdout
    assert "FAILED" not in done.stdout
    assert all(f"not run: {case.name}: {case.gpus} GPUs" in done.stdout for case in gpu.CASES)


def test_without_a_gpu_nothing_is_claimed(tmp_path):
    done = script("--out", str(tmp_path))
    assert done.returncode == 1
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2, "the head alone"
    assert done.stdout.count("here 0 (no CUDA device)") == len(gpu.CASES)


def test_a_line_that_is_wrong_is_found(tmp_path):
    good = gpu.CASES[0]
    gpu.check(good, tmp_path)
    with pytest.raises(ConfigError, match="unknown flag --odyssey-polcy"):
        gpu.check(replace(good, flags="--odyssey-polcy reroute"), tmp_path)
    with pytest.raises(ConfigError, match="is not one of 2"):
        gpu.check(replace(good, inject="rank=2,step=6,at=backward"), tmp_path)
    with pytest.raises(SystemExit):
        gpu.check(replace(good, flags="--pipeline-parallel 2"), tmp_path)
