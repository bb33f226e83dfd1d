"""Whole jobs forked from one preloaded process: a job of eight ranks starts in a fraction of a second.

server = JobServer.start(["tests.launch.preload"])
job = server.run(["--nproc-per-node", "8", "script.py", ...], log=tmp_path / "log", env={...})
assert job.wait(30) == 0, job.log()
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odyssey_megatron.launch.process.zygote import ForkedProcess, Zygote
from odyssey_megatron.metrics.journal import read_journal

CHECKOUT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
"""Of jobs that are timed."""


@dataclass
class Job:
    """One ``odyssey run``, i.e. one agent with its ranks."""

    process: ForkedProcess
    log_path: Path

    @property
    def pid(self) -> int:
        """Of the launcher, which is the agent."""
        return self.process.pid

    def wait(self, timeout_s: float) -> int:
        """The exit code. A job that does not end is killed, and fails the test with its log. So is one whose test is
        given up meanwhile: it would go on beside the next ones.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the job did not end within {timeout_s} s:\n{self.log()}") from None
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL to the agent; its ranks die with it."""
        os.kill(self.pid, signal.SIGKILL)

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""


class JobServer:
    """The preloaded process."""

    def __init__(self, zygote: Zygote, modules: Sequence[str], env: Mapping[str, str]):
        self._zygote, self._modules, self._env = zygote, modules, env

    @classmethod
    def start(cls, modules: Sequence[str]) -> JobServer:
        path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path}
        return cls(Zygote.spawn(modules, env), modules, env)

    def run(
        self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, command: str = "run"
    ) -> Job:
        """``odyssey run argv``; its ranks are forked, too."""
        whole = {**self._env, "ODYSSEY_PRELOAD": ",".join(self._modules), **(env or {})}
        whole_command = ["-m", "odyssey_megatron", command, *map(str, argv)]
        return Job(self._zygote.run(whole_command, env=whole, stdout=str(log), stderr=str(log)), log)

    def script(self, argv: Sequence[str], *, log: Path) -> Job:
        """``python argv``, in a fork of the preloaded process."""
        return Job(self._zygote.run(list(argv), env=self._env, stdout=str(log), stderr=str(log)), log)

    def close(self) -> None:
        self._zygote.close()


def events(run_dir: Path, *names: str) -> list[dict[str, Any]]:
    """The journal's events of these names, so far."""
    return [event for event in read_journal(run_dir) if event["event"] in names]


def pid_of(run_dir: Path, rank: int) -> int:
    return next(e["pid"] for e in events(run_dir, "rank_started") if e["target"] == rank)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Any, timeout_s: float, what: str) -> Any:
    """Polls ``condition`` until it is true; its value."""
    ends_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < ends_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
    return value
