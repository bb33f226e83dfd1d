"""One preloaded process for all jobs of these tests, with Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobserver import CHECKOUT, JobServer

collect_ignore_glob: list[str] = []
try:
    import torch  # noqa: F401

    from tests.te.offer import FOLDER
except ImportError:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.e2e.jobs import Jobs
    from tests.megatron_lm.jobs import MegatronJobs


@pytest.fixture(autouse=True)
def _installed() -> None:
    if not FOLDER.exists():
        pytest.skip(f"no {FOLDER}: run these by bash tests/run.sh, which installs it")


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Of the example."""
    server = JobServer.start(["tests.te.on_cpu", "tests.e2e.preload"])
    example = CHECKOUT / "tests" / "te" / "pretrain.py"
    yield Jobs(server=server, folder=tmp_path_factory.mktemp("te"), example=example)
    server.close()


@pytest.fixture(scope="session")
def megatron_jobs(megatron_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronJobs]:
    """Of unmodified Megatron-LM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_LM_PATH", str(megatron_lm))
        server = JobServer.start(["tests.te.offered", "tests.megatron_lm.preload"])
    yield MegatronJobs(server, tmp_path_factory.mktemp("te-megatron-lm"), megatron_lm)
    server.close()
