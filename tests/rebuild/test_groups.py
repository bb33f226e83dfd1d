"""Groups of a generation: what torch.distributed does over them, and that nothing outlives the generation."""

from __future__ import annotations

import pytest

from tests.launch.jobserver import CHECKOUT

pytestmark = pytest.mark.usefixtures("server")


def test_operations_and_their_end(server, tmp_path):
    job = server.run(
        ["--nproc-per-node", 3, CHECKOUT / "tests/rebuild/operations.py", "--odyssey-device", "cpu",
         "--odyssey-run-dir", tmp_path / "run", "--odyssey-op-timeout-s", 30],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    left_s: dict[str, list[float]] = {}
    for path in (tmp_path / "run").glob("left-*"):
        _, rank, name = path.name.split("-")
        if rank != "0":
            left_s.setdefault(name, []).append(float(path.read_text()))
    assert len(left_s) == 8
    assert all(len(times) == 2 for times in left_s.values())
    # From the publication of the new generation until the wait in the old one was left. 0.5 s is generous for a
    # busy machine; without the abort it would be the timeout of an operation, 30 s.
    assert max(max(times) for times in left_s.values()) < 0.5, left_s
