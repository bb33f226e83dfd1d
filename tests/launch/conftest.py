"""One preloaded process for all jobs of these tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.jobserver import CHECKOUT, Job, JobServer

# The pure tests run without torch; these do not.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

# Before torch is imported: its store client complains, with a C++ stack, of every connection that ends.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def server() -> Iterator[JobServer]:
    server = JobServer.start(["tests.launch.preload"])
    yield server
    server.close()


@pytest.fixture
def toy(server: JobServer, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts a toy job: ``toy(ranks, "--steps", 20, ...)``. Its journal is in ``tmp_path / "run"``."""
    jobs = []

    def start(ranks: int, *arguments: object, launch: tuple[object, ...] = (), **env: str) -> Job:
        argv = ["--nproc-per-node", ranks, *launch, CHECKOUT / "tests/launch/toy.py", *arguments]
        argv += ["--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run"]
        job = server.run(argv, log=tmp_path / f"log{len(jobs)}", env=env)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.kill()
