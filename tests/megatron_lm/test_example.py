"""The command in the README, as a user types it: nothing is preloaded by the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import MegatronRun


def test_the_tiny_model_survives_its_last_rank_and_rank_0(megatron_lm, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(CHECKOUT / "examples/megatron_lm/tiny.sh"), str(megatron_lm), "--odyssey-run-dir", "my-run",
         "--odyssey-inject", "rank=7,step=3,at=backward;rank=0,step=8,at=forward"],
        cwd=tmp_path, env={**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=110, check=False,
    )  # fmt: skip
    run = MegatronRun(exit_code=done.returncode, run_dir=tmp_path / "my-run", log=done.stdout)
    assert run.exit_code == 0, run.log[-3000:]
    assert run.killed == [0, 7]
    assert [one.number for one in run.iterations] == list(range(1, 13))
    assert run.iterations[-1].loss < run.iterations[0].loss - 1.0, "nothing was learned"
