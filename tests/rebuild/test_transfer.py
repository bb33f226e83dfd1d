"""Before anything is sent, who sends and who receives agree on names, shapes and types."""

from __future__ import annotations

import json

import pytest

from tests.launch.jobserver import CHECKOUT

pytestmark = pytest.mark.usefixtures("server")

SAID = {
    "less": (
        "rank 0: weight float32 [3, 5]; bias float32 [3]. ",
        "rank 2: 2 that all have and weight.momentum float32 [3, 5]. ",
    ),
    "shape": ("weight float32 [3, 5]", "weight float32 [5, 3]"),
    "type": ("bias float32 [3]", "bias int32 [3]"),
    "name": ("weight.momentum float32 [3, 5]", "weight.speed float32 [3, 5]"),
    "order": (
        "weight float32 [3, 5]; bias float32 [3]; ",
        "weight.momentum float32 [3, 5]; bias float32 [3]; ",
    ),
    "weights": ("rank 0, rank 1: weight float32 [3]", "rank 2: weight float32 [2]"),
}


def test_what_differs_is_said_by_all_ranks_and_nothing_is_sent(server, tmp_path):
    job = server.run(
        ["--nproc-per-node", 3, CHECKOUT / "tests/rebuild/moving.py", "--odyssey-device", "cpu",
         "--odyssey-run-dir", tmp_path / "run", "--odyssey-op-timeout-s", 30],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    by_rank = [json.loads((tmp_path / "run" / f"found{rank}.json").read_text()) for rank in range(3)]
    assert by_rank[0].keys() == SAID.keys()
    assert by_rank[0] == by_rank[1] == by_rank[2], "all ranks end with the same message"
    for case, parts in SAID.items():
        message = by_rank[0][case]
        assert "nothing was sent" in message
        assert all(part in message for part in parts), message
    assert all("layer 3" in message for case, message in by_rank[0].items() if case != "weights")
