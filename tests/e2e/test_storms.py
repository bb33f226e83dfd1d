"""Many ranks of a Megatron job are killed in a short time, from outside: the run equals one without, to 1e-10."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e import slow_end
from tests.e2e.jobs import (
    SCRIPT,
    TOLERANCE,
    assert_equal_numbers,
    assert_equal_weights,
    assert_holders_agree,
)
from tests.launch.jobserver import events, wait_for

pytestmark = pytest.mark.timeout(400)

RANKS = 8
STEPS, STEPS_TO_COME_BACK = "--train-iters 20", "--train-iters 100"
STORMS = {
    # how many ranks, of how many stages, how long one after another (None: at once)
    "3 at once": (3, 2, None),
    "7 at once": (7, 1, None),
    "3, one every 10 ms": (3, 2, 0.01),
    "7, one every 10 ms": (7, 1, 0.01),
    "3, one every 50 ms": (3, 2, 0.05),
    "7, one every 50 ms": (7, 1, 0.05),
}
"""Each layer keeps a holder: with two stages it has four, which reroute leaves where they are."""


class Storm:
    """Over one job."""

    def __init__(self, jobs, name, storm, *flags, script=SCRIPT):
        self.kills, stages, self.apart_s = STORMS[storm]
        self.jobs, self.name, self.run_dir = jobs, name, jobs.folder / name
        self.random = random.Random(name)
        # One rank is never shot at, so that no layer loses all its holders while others are filled.
        self.victims = self.random.sample(range(RANKS), self.kills)
        self.job = jobs.server.run(
            ["--nproc-per-node", RANKS, script, *jobs.flags(name, stages=stages), *STEPS.split(),
             "--odyssey-policy", "reroute", *flags],
            log=jobs.folder / f"{name}.log",
        )  # fmt: skip
        self.shot: list[int] = []

    def wait_for(self, event: str, count: int = 1) -> None:
        wait_for(
            lambda: len(events(self.run_dir, event)) >= count or self.job.process.poll() is not None,
            90,
            event,
        )

    def blow(self, within_s: float | None = None) -> None:
        """All victims; ``within_s``: at random moments in that time."""
        moments = sorted(self.random.uniform(0, within_s or 0) for _ in self.victims)
        began_s = time.monotonic()
        pids = self._pids()
        for rank, moment_s in zip(self.victims, moments, strict=True):
            time.sleep(max(0.0, began_s + moment_s - time.monotonic()) if within_s else self.apart_s or 0.0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
                self.shot.append(rank)

    def _pids(self) -> dict[int, int]:
        return {e["target"]: e["pid"] for e in events(self.run_dir, "rank_started")}

    def assert_equal(self, reference, *, respawn: bool = False) -> None:
        code = self.job.wait(240)
        assert code == 0, self.job.log()[-5000:]
        assert len(self.shot) >= self.kills, "the storm that the test is about did not happen"
        shot = self.jobs.outcome(self.name, exit_code=code, log=self.job.log())
        assert_equal_numbers(shot.run.steps, reference.run.steps, rel=TOLERANCE)
        assert_equal_weights(shot.weights(), reference.weights())
        assert_holders_agree(shot)
        if respawn:
            assert shot.named("rank_joined")


@pytest.mark.matrix
@pytest.mark.parametrize("storm", STORMS)
def test_in_the_middle(jobs, undisturbed, name, storm):
    shot = Storm(jobs, name, storm)
    shot.wait_for("step_committed", 3)
    shot.blow()
    shot.assert_equal(undisturbed(STEPS))


@pytest.mark.matrix
@pytest.mark.parametrize("storm", STORMS)
def test_while_ranks_join(jobs, undisturbed, name, storm):
    """The first victim comes back, and is being filled; all victims come back."""
    shot = Storm(jobs, name, storm, *STEPS_TO_COME_BACK.split(), "--odyssey-respawn", "5")
    shot.wait_for("step_committed", 3)
    os.kill(shot._pids()[shot.victims[0]], signal.SIGKILL)
    shot.wait_for("rank_joined")
    shot.blow(0.1 if shot.apart_s is None else None)
    shot.assert_equal(undisturbed(STEPS_TO_COME_BACK), respawn=True)


@pytest.mark.matrix
@pytest.mark.parametrize("respawn", ["0", "5"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("storm", ["3 at once", "7 at once"])
def test_in_the_first_moments(jobs, undisturbed, name, storm, seed, respawn):
    """From the start of the processes on: before a rank has spoken, while they post their job, in the first groups."""
    shot = Storm(jobs, name, storm, "--odyssey-respawn", respawn)
    shot.wait_for("rank_started", RANKS)
    shot.blow(within_s=0.6)
    shot.assert_equal(undisturbed(STEPS))


@pytest.mark.matrix
@pytest.mark.parametrize("respawn", ["0", "5"])
@pytest.mark.parametrize("storm", STORMS)
def test_at_the_last_step(jobs, undisturbed, name, storm, respawn):
    script = Path(slow_end.__file__)
    shot = Storm(jobs, name, storm, "--odyssey-respawn", respawn, script=script)
    wait_for(slow_end.marker(shot.run_dir).exists, 90, "the last step")
    time.sleep(shot.random.uniform(0, slow_end.WAITS_S / 2))
    shot.blow()
    shot.assert_equal(undisturbed(STEPS))
    lost = {rank for event in events(shot.run_dir, "failure_detected") for rank in event["dead"]}
    assert lost == set(shot.victims), "they died before the job was over"
