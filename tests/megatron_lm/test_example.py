"""The command in the README, as a user types it: nothing is preloaded by the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch.jobserver import CHECKOUT, events, wait_for
from tests.megatron_lm.jobs import MegatronRun


def start(megatron_lm: Path, folder: Path, *flags: str) -> subprocess.Popen[str]:
    """The example in ``folder``, which logs there."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(CHECKOUT / "examples/megatron_lm/tiny.sh"), str(megatron_lm)]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [*command, "--odyssey-run-dir", "my-run", *flags],
            cwd=folder, env={**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT)}, stdout=log,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def outcome(job: subprocess.Popen[str], folder: Path) -> MegatronRun:
    try:
        exit_code = job.wait(110)
    finally:
        job.kill()
    return MegatronRun(exit_code=exit_code, run_dir=folder / "my-run", log=(folder / "log").read_text())


def test_the_tiny_model_survives_its_last_rank_and_rank_0(megatron_lm, tmp_path):
    faults = "rank=7,step=3,at=backward;rank=0,step=8,at=forward"
    run = outcome(start(megatron_lm, tmp_path, "--odyssey-inject", faults), tmp_path)
    assert run.exit_code == 0, run.log[-3000:]
    assert run.killed == [0, 7]
    assert [one.number for one in run.iterations] == list(range(1, 13))
    assert run.iterations[-1].loss < run.iterations[0].loss - 1.0, "nothing was learned"


def test_who_ends_a_job_is_not_shown_the_stacks_of_its_ranks(megatron_lm, tmp_path):
    """Megatron's inference has each process that imports it print its stack when a signal comes."""
    job = start(megatron_lm, tmp_path, "--train-iters", "3000")
    try:
        wait_for(lambda: events(tmp_path / "my-run", "step_committed"), 90, "a step")
        job.terminate()
    finally:
        run = outcome(job, tmp_path)
    assert run.exit_code == 128 + signal.SIGTERM, run.log[-3000:]
    assert "the job was ended by SIGTERM" in run.log
    assert "Stack (most recent call first)" not in run.log
