"""Interpreter, messages, agreement, transfer and recovery over real gloo, without Megatron."""

from __future__ import annotations

import pytest

from odyssey_megatron.metrics.run import read_run
from tests.launch.jobserver import CHECKOUT

torch = pytest.importorskip("torch")

FAULTS = {
    "none": "",
    "reroute": "rank=1,step=2,at=backward;rank=6,step=5,at=reduce",
    "replan": "rank=0,step=2,at=forward;rank=7,step=4,at=optimizer",
}


@pytest.mark.parametrize("messages", ["tags", "pairs"])
@pytest.mark.parametrize("faults", FAULTS)
def test_equal_to_one_process(server, tmp_path, messages, faults):
    from tests.execute.stack import undisturbed

    policy = "auto" if faults == "none" else faults
    job = server.run(
        ["--nproc-per-node", 8, CHECKOUT / "tests/execute/stack.py", "--messages", messages, "--stages", 2,
         "--out", tmp_path / "weights", "--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run",
         "--odyssey-policy", policy, "--odyssey-inject", FAULTS[faults]],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    losses, weights = undisturbed()
    run = read_run(tmp_path / "run")
    assert len(run.recoveries) == FAULTS[faults].count("rank=")
    assert [step.loss for step in run.steps] == pytest.approx(losses, rel=1e-12)
    held = [torch.load(path) for path in tmp_path.glob("weights.*")]
    assert {layer for one in held for layer in one} == set(weights)
    for one in held:
        for layer, weight in one.items():
            assert torch.allclose(weight, weights[layer], rtol=1e-12, atol=1e-14)
