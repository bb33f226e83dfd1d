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
@pytest.mark.timeout(300)
def test_the_dry_run_measures_one_job_and_says_what_is_left(tmp_path):
    done = script("--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| a kill, rerouted; over gloo on 1 GPU(s) | 2 | stall " in done.stdout
    assert "FAILED" not in done.stdout
    assert all(f"not run: {case.name}: {case.gpus} GPUs" in done.stdout for case in (*gpu.CASES, *gpu.BESIDE))
    beside = "| Megatron-LM, a kill; over gloo on 1 GPU(s) | 2 | losses within" in done.stdout
    assert beside == bool(os.environ.get("MEGATRON_LM_PATH"))


def test_without_a_gpu_nothing_is_claimed(tmp_path):
    done = script("--out", str(tmp_path))
    assert done.returncode == 1
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2, "the head alone"
    assert done.stdout.count("here 0 (no CUDA device)") == len(gpu.CASES) + len(gpu.BESIDE)


def test_a_line_that_is_wrong_is_found(tmp_path):
    good = gpu.CASES[0]
    gpu.check(good, tmp_path)
    gpu.check(good, tmp_path, shares=True)
    with pytest.raises(ConfigError, match="unknown flag --odyssey-polcy"):
        gpu.check(replace(good, flags="--odyssey-polcy reroute"), tmp_path)
    with pytest.raises(ConfigError, match="is not one of 2"):
        gpu.check(replace(good, inject="rank=2,step=6,at=backward"), tmp_path)
    with pytest.raises(SystemExit):
        gpu.check(replace(good, flags="--pipeline-parallel 2"), tmp_path)


def printed(path, losses, ms=100.0):
    path.write_text(
        "".join(
            f" iteration {at:8}/      20 | elapsed time per iteration (ms): {ms} | lm loss: {loss:.6E} | grad norm: 1\n"
            for at, loss in enumerate(losses, start=1)
        )
    )
    return path


def test_what_megatron_lm_prints_is_compared(tmp_path):
    case, losses = gpu.BESIDE[1], [6.0 - 0.1 * at for at in range(20)]
    logs = {"plain": printed(tmp_path / "plain", losses)}
    ours = logs | {"undisturbed": printed(tmp_path / "undisturbed", losses, ms=102.0)}
    assert gpu.gpu_megatron_lm.figures(case, ours).endswith("102 ms undisturbed, 1.02 of its")
    off = printed(tmp_path / "shot", [*losses[:-1], 1.01 * losses[-1]])
    with pytest.raises(ConfigError, match="off plain Megatron-LM's"):
        gpu.gpu_megatron_lm.figures(case, ours | {"shot": off})
    cut_off = printed(tmp_path / "shot", losses[:-1])
    with pytest.raises(ConfigError, match="printed 19 of 20"):
        gpu.gpu_megatron_lm.figures(case, ours | {"shot": cut_off})
