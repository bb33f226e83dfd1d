"""Ranks die at random moments while others come back: killed from outside, several times in each job.

``ODYSSEY_SEED`` is the seed of victims and moments; each job prints what became of its kills.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from odyssey_megatron.metrics.journal import read_journal
from tests.launch.jobserver import Job
from tests.megatron_lm.jobs import FLOAT64, MOCK, MegatronRun, assert_same_lines

pytestmark = [pytest.mark.timeout(1500), pytest.mark.matrix]
SEED = os.environ.get("ODYSSEY_SEED", "1")
RANKS = 8
FLAGS = (
    f"{MOCK} --odyssey-float64 on --train-iters 100 --eval-interval 20 --eval-iters 1 "
    "--check-weight-hash-across-dp-replicas-interval 25"
)
LAST_KILL = 60
"""The iteration after which nobody is killed, so that all have the time to come back."""
KILLS = 12
CASES = {
    "PP2xDP4": (2, 1, ""),
    "PP4xDP2": (4, 1, ""),
    "TP2xPP2": (2, 2, ""),
    "optimizer": (2, 1, "--use-distributed-optimizer"),
    "saves": (4, 1, "--save-interval 15"),
}
"""Stages, ranks of a cell, more flags."""


class Killer:
    """Kills ranks of a job that runs, as its journal tells about it."""

    def __init__(self, run_dir: Path, job: Job, *, cell: int, seed: str):
        self._run_dir, self._job, self._cell, self._random = run_dir, job, cell, random.Random(seed)
        self.killed: list[tuple[float, int, str]] = []
        """When (seconds since the epoch), the rank, and which it was."""

    def run(self) -> None:
        seen = RANKS
        while _runs(self._job.pid) and len(self.killed) < KILLS:
            time.sleep(0.05)
            agent = self._run_dir / "journal" / "agent0.jsonl"
            if not agent.exists() or (committed := self._job.log().count(" iteration   ")) < 3:
                continue
            if committed >= LAST_KILL:
                return
            text = agent.read_text()
            begun = text.count('"event":"rank_started"') + text.count('"event":"rank_joined"')
            if not self.killed or begun > seen:
                # Within the set-up, the offer, the first steps or what is behind them.
                time.sleep(self._random.choice((0.0, 0.05, 0.3, 2.0)) * self._random.random())
                self._kill(list(read_journal(self._run_dir)))
                seen = begun

    def _kill(self, events: list[dict[str, Any]]) -> None:
        started = [e for e in events if e["event"] == "rank_started"]
        pids = {e["target"]: e["pid"] for e in started}
        living = {rank for rank, pid in pids.items() if _runs(pid)}
        holding = {rank for rank in living if self._holds(rank, events)}
        joiner = started[-1]["target"] if len(started) > RANKS else None
        favourites = [
            joiner,
            joiner,
            joiner,
            0,
            RANKS - 1,
            *(() if joiner is None else (joiner ^ 1, joiner ^ 2)),
        ]
        victim = self._random.choice([*favourites, self._random.randrange(RANKS)])
        if victim not in living or (victim in holding and not self._spared(victim, holding, events)):
            victim = joiner
        if victim not in living or (victim in holding and not self._spared(victim, holding, events)):
            return
        which = "new" if victim not in holding else "joined before" if victim == joiner else "other"
        self.killed.append((time.time(), victim, which))
        os.kill(pids[victim], signal.SIGKILL)

    def _holds(self, rank: int, events: list[dict[str, Any]]) -> bool:
        """Not a new process until a step was committed in a generation that it was filled in."""
        since_s = [e["wall_s"] for e in events if e["event"] == "rank_started" and e["target"] == rank][-1]
        if sum(e["event"] == "rank_started" and e["target"] == rank for e in events) == 1:
            return True
        filled = [
            e["generation"]
            for e in events
            if e["event"] == "switched" and e["rank"] == rank and e["wall_s"] > since_s
        ]
        committed = [e["generation"] for e in events if e["event"] == "step_committed"]
        return bool(filled) and max(committed, default=0) >= filled[0]

    def _spared(self, victim: int, holding: set[int], events: list[dict[str, Any]]) -> bool:
        """Whether each layer has a holder without it, whichever of the last plans counts."""
        whole = [
            worker
            for worker in range(RANKS // self._cell)
            if {worker * self._cell + at for at in range(self._cell)} <= holding
            and worker != victim // self._cell
        ]
        layouts = [e["layout"] for e in events if e["event"] == "decision"][-3:]
        columns = [one[name] for one in layouts for name in ("holders", "keepers") if one.get(name)]
        return all(set(holders) & set(whole) for column in columns for holders in column)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def undisturbed(jobs):
    """One pipeline without a failure, whose initial weights are those of as many stages."""

    @functools.cache
    def run(stages: int, cell: int) -> MegatronRun:
        name, flags = f"undisturbed-{stages}-{cell}", f"{FLAGS} --tensor-model-parallel-size {cell}"
        return jobs.outcome(name, jobs.start(name, flags, ranks=stages * cell, stages=stages), limit_s=900.0)

    return run


@pytest.mark.parametrize("case", CASES)
def test_nobody_is_lost_for_good(jobs, undisturbed, name, case):
    stages, cell, more = CASES[case]
    flags = f"{FLAGS} {more} --odyssey-respawn 30 --tensor-model-parallel-size {cell}"
    if "--save" in more:
        flags += f" --save {jobs.folder / name / 'saved'}"
    job = jobs.start(name, flags, ranks=RANKS, stages=stages)
    killer = Killer(jobs.folder / name, job, cell=cell, seed=f"{SEED} {case}")
    killer.run()
    run = jobs.outcome(name, job, limit_s=900.0)
    print(f"seed {SEED}, {case}: {Counter(which for *_, which in killer.killed)}")
    assert_same_lines(run, undisturbed(stages, cell), rel=FLOAT64)
    assert len(killer.killed) >= 3
    assert not run.named("left_out"), "holders differed"
    begun = {e["generation"]: e["members"] for e in run.named("generation_started")}
    assert begun[max(begun)] == list(range(RANKS)), "all are back"
    assert_report(run, killer.killed)


def assert_report(run: MegatronRun, killed: list[tuple[float, int, str]]) -> None:
    """Each stall is what somebody outside sees: from a kill to the slowest rank's next instruction."""
    rows = [row for row in run.run.recoveries if row.stall_s is not None]
    assert rows
    assert min(row.stall_s for row in rows) > 0, rows
    for row in rows:
        resumed = [
            e["resumed_s"] + e["wall_s"] - e["t_s"]
            for e in run.named("recovered")
            if e["generation"] == row.generation
        ]
        ours = [at_s for at_s, rank, _ in killed if rank in row.dead and at_s < row.failed_wall_s + 0.01]
        if ours:
            outside_s = max(resumed) - ours[-1]
            print(
                f"generation {row.generation}: {row.stall_s:.3f} s in the report, {outside_s:.3f} s outside"
            )
            # Noticing comes on top; and an earlier recovery that this one superseded counts.
            assert row.failed_wall_s - ours[-1] < 0.5
            assert row.stall_s > outside_s - 0.5
