"""Interpreter, messages, agreement, transfer and recovery over real gloo, without Megatron."""

from __future__ import annotations

import pytest

from odyssey_megatron.metrics.run import read_run
from tests.launch.jobserver import CHECKOUT

torch = pytest.importorskip("torch")

FAULTS = {
    "none": "",
    "reroute": "rank=1,step=2,at=backward;rank=6,step=5,at=reduce",
    "replan": "rank=0,step=2,at=forward;rank=7,step=4,at=agreement",  # computing or not: by what was measured
}


@pytest.mark.parametrize("messages", ["tags", "pairs"])
@pytest.mark.parametrize("faults", FAULTS)
def test_equal_to_one_process(server, tmp_path, messages, faults):
    policy = "auto" if faults == "none" else faults
    job = server.run(
        ["--nproc-per-node", 8, CHECKOUT / "tests/execute/stack.py", "--messages", messages, "--stages", 2,
         "--out", tmp_path / "weights", "--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run",
         "--odyssey-policy", policy, "--odyssey-inject", FAULTS[faults]],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    run = check(tmp_path)
    assert len(run.recoveries) == FAULTS[faults].count("rank=")


@pytest.mark.matrix
@pytest.mark.parametrize("messages", ["tags", "pairs"])
@pytest.mark.parametrize("victim", [0, 3, 6])
def test_a_death_while_messages_are_timed(server, tmp_path, messages, victim):
    job = server.run(
        ["--nproc-per-node", 8, CHECKOUT / "tests/execute/stack.py", "--messages", messages, "--stages", 4,
         "--out", tmp_path / "weights", "--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run",
         "--odyssey-profile-steps", 2, "--odyssey-policy", "reroute", "--odyssey-time-links", "on",
         "--odyssey-inject", f"rank={victim},step=2,at=exchange;link=1>3,step=1,slow=3,until=6"],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    assert len(check(tmp_path).recoveries) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("messages", ["tags", "pairs"])
@pytest.mark.parametrize("victim", range(4))
def test_one_pipeline_goes_on_in_mid_step(server, tmp_path, messages, victim):
    """No neighbour can be through with its gradients when it hears of the death, since the last microbatches have not
    begun: all of them keep what they have.
    """
    job = server.run(
        ["--nproc-per-node", 4, CHECKOUT / "tests/execute/stack.py", "--messages", messages, "--stages", 4,
         "--out", tmp_path / "weights", "--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run",
         "--odyssey-policy", "reroute", "--odyssey-redundancy", "state",
         "--odyssey-inject", f"rank={victim},step=2,at=backward,microbatch=2"],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    assert [one.outcome for one in check(tmp_path).recoveries] == ["resume"]


@pytest.mark.parametrize(
    ("stages", "victim", "at"),
    [(4, 0, "backward,microbatch=2"), (4, 3, "backward,microbatch=4"), (2, 1, "backward")],
)
def test_what_has_been_run_ahead_is_not_done_again(server, tmp_path, stages, victim, at):
    """One pipeline with shadows, and two whose first stages run ahead for each other. How far the others have come when
    the victim dies is theirs: on a busy machine one may have run nothing ahead yet, but not time and again.
    """
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        job = server.run(
            ["--nproc-per-node", 4, CHECKOUT / "tests/execute/stack.py", "--stages", stages,
             "--out", folder / "weights", "--odyssey-device", "cpu", "--odyssey-run-dir", folder / "run",
             "--odyssey-policy", "reroute", "--odyssey-redundancy", "compute",
             "--odyssey-inject", f"rank={victim},step=2,at={at}"],
            log=folder / "log",
        )  # fmt: skip
        assert job.wait(60) == 0, job.log()
        (recovery,) = check(folder).recoveries
        assert recovery.outcome == "resume"
        if recovery.eager_forwards > 0:
            return
    pytest.fail("four times nothing had been run ahead")


def test_auto_says_what_it_weighs(server, tmp_path):
    """A pipeline with nothing to lose twice, and a failure every ten minutes: shadows cost less than a restart."""
    job = server.run(
        ["--nproc-per-node", 4, CHECKOUT / "tests/execute/stack.py", "--stages", 4,
         "--out", tmp_path / "weights", "--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run",
         "--odyssey-policy", "reroute", "--odyssey-redundancy", "auto", "--odyssey-mtbf-s", "600",
         "--odyssey-inject", "rank=1,step=2,at=backward"],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    run = check(tmp_path)
    assert len(run.recoveries) == 1
    rows = {row["name"]: row for row in run.decisions[0].candidates}
    assert set(rows) == {"redundancy off", "redundancy state", "redundancy compute"}
    assert not rows["redundancy off"]["chosen"]
    assert "100% of failures cost 300 s" in rows["redundancy off"]["reason"]
    assert "forwards run ahead" in rows["redundancy compute"]["reason"]


def test_without_memory_to_go_on_the_step_is_done_again(server, tmp_path):
    job = server.run(
        ["--nproc-per-node", 4, CHECKOUT / "tests/execute/stack.py", "--exhausted", 0, "--stages", 4,
         "--out", tmp_path / "weights", "--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run",
         "--odyssey-policy", "reroute", "--odyssey-redundancy", "state",
         "--odyssey-inject", "rank=1,step=2,at=backward,microbatch=4"],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    assert [(one.generation, one.outcome) for one in check(tmp_path).recoveries] == [
        (2, "resume"),
        (3, "redo"),
    ]


def check(folder):
    """The run in ``folder`` is that of one process."""
    from tests.execute.alone import undisturbed

    alone = undisturbed()
    run = read_run(folder / "run")
    assert [step.loss for step in run.steps] == pytest.approx(alone.losses, rel=1e-12)
    held = [torch.load(path) for path in folder.glob("weights.*")]
    assert {layer for one in held for layer in one} == {layer for layer, _ in alone.weights}
    for one in held:
        for layer, weight in one.items():
            assert torch.allclose(weight, alone.weights[layer, "w0"], rtol=1e-12, atol=1e-14)
    return run
