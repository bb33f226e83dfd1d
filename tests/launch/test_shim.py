"""Jobs under another launcher, whose processes stand in for ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from tests.launch.jobserver import CHECKOUT, ENVIRONMENT, events, wait_for
from tests.launch.test_survival import is_running
from tests.surroundings.trees import tree

ENTERS = """
import runpy
from odyssey_megatron.launch import shim
if shim.is_needed():
    shim.become()
runpy.run_path(TOY, run_name="__main__")
"""
"""What a patched Megatron-LM does first, and the toy in its place."""


def test_a_job_ends_with_its_launcher(tmp_path):
    """A stand-in that outlives it would train on, unseen, beside the job that is started next."""
    script, run = tmp_path / "patched.py", tmp_path / "run"
    script.write_text(ENTERS.replace("TOY", repr(str(CHECKOUT / "tests/launch/toy.py"))))
    argv = [
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        "--pipeline",
        "1",
        "--hold",
        str(tmp_path / "go"),
    ]
    argv += ["--odyssey-device", "cpu", "--odyssey-run-dir", str(run)]
    # What torchrun leaves behind when it is killed is no business of other tests.
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(CHECKOUT), "TMPDIR": str(tmp_path)}
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "torch.distributed.run", *argv]
        launcher = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    pids: list[int] = []
    try:
        wait_for(lambda: len(events(run, "recovered")) == 2, 90, "all ranks in their groups")
        pids = tree(launcher.pid)
        assert {one["pid"] for one in events(run, "rank_started")} < set(pids)
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not any(map(is_running, pids)), 10, "the job ends")
    finally:
        for pid in [launcher.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
