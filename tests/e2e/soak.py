"""A job that is shot at for long: random kills and hangs from a seed, at random moments; all that die come back.

    python tests/e2e/soak.py --kills 200 [--seed 1] [--json]

One small Megatron job (PP2 x DP3, float64) with --odyssey-respawn, beside the same without failures. Whoever may die
without taking the last copy of a layer along may be hit at any moment: in a step, in a recovery, while it is filled.
After every step the job checks that all holders of a layer have the same bytes.
The agent, and the processes of all ranks at the end, must not have more than at a quarter of the kills: one that has
lived that long (one rank is spared) than itself then, a newer one than the fullest then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "benchmarks")]

from bars import at_least, at_most, exactly, finish

from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.recoveries import recoveries
from odyssey_megatron.metrics.run import read_run
from odyssey_megatron.metrics.steps import CommittedStep, check_samples, loss_difference
from odyssey_megatron.metrics.timeline import last_job
from tests.e2e.test_leaks import usage

RANKS, STAGES, SPARED = 6, 2, 3
STEPS_A_KILL = 12
_BURIED_S = 6.0
"""By then the groups of ended generations are gone (rebuild/groups.py)."""
_WANTED = {
    "step_committed", "failure_detected", "decision", "generation_started", "rank_started", "switched"
}  # fmt: skip
ROOM = {"threads": 8, "fds": 16, "rss_kib": 16 * 1024}
"""By so much a process may have grown. A leak of each recovery would be some hundred times that of one."""
HANGS = 0.1
"""Of the faults, so many are SIGSTOP."""
FLAGS = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --odyssey-device cpu --odyssey-float64 on "
    "--odyssey-hang-s 1.0 --odyssey-op-timeout-s 3"
)


def start(folder: Path, steps: int, ranks: int, stages: int, *flags: str) -> subprocess.Popen[bytes]:
    """The job, its log in ``folder``."""
    command = [sys.executable, "-m", "odyssey_megatron", "run", "--nproc-per-node", str(ranks)]
    command += ["--preload", "odyssey_megatron.mcore.cpu_preload", "examples/llama/pretrain_llama.py"]
    command += [*FLAGS.split(), "--pipeline-model-parallel-size", str(stages), "--train-iters", str(steps)]
    command += ["--odyssey-run-dir", str(folder), "--data-cache-path", str(folder.parent / "cache"), *flags]
    env = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(CHECKOUT),
    }  # fmt: skip
    folder.mkdir()
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=CHECKOUT, env=env, stdout=log, stderr=log)


class Tail:
    """The journal of a running job, read on as it grows."""

    def __init__(self, folder: Path):
        self._folder = folder / "journal"
        self._read: dict[Path, int] = {}
        self.events: list[dict[str, Any]] = []

    def more(self) -> list[dict[str, Any]]:
        """All events so far, in order."""
        new = []
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            new += [json.loads(line) for line in whole.splitlines()]
        kept = [event for event in new if event["event"] in _WANTED]
        self.events += sorted(kept, key=lambda event: event["wall_s"])
        return self.events


class Gunman:
    """Kills and stops ranks of a running job, but never the last holder of a layer."""

    def __init__(self, job: subprocess.Popen[bytes], folder: Path, seed: int):
        self._job, self._tail, self._rng = job, Tail(folder), random.Random(seed)
        self.shot: list[tuple[int, str]] = []
        self.grown: dict[str, int] = {}
        """Of threads, descriptors and memory the greatest growth of a rank and of the agent; empty if not taken."""
        self._first: dict[int, dict[str, int]] = {}

    def fire(self, kills: int) -> None:
        """Until so many are dead, or the job has ended."""
        while len(self.shot) < kills and self._job.poll() is None:
            time.sleep(self._rng.choice((0.05, 0.3, 1.0, 2.0)) * self._rng.random())
            events = self._tail.more()
            if sum(event["event"] == "step_committed" for event in events) < 3:
                continue
            if len(self.shot) == kills // 4 and not self._first:
                self._first = self._usage()
            victims = self._who_may_die(events)
            if victims:
                self._shoot(self._rng.choice(victims), events)
        if self._first and self._job.poll() is None:
            self.grown = growth(self._first, self._usage(), self._job.pid)

    def _shoot(self, rank: int, events: list[dict[str, Any]]) -> None:
        name = "STOP" if self._rng.random() < HANGS else "KILL"
        with contextlib.suppress(ProcessLookupError):
            os.kill(_pids(events)[rank], getattr(signal, "SIG" + name))
            self.shot.append((rank, name))
        # Until its death is on record it counts as alive, and the next one might be the last other holder.
        known = _losses(events)
        ends_s = time.monotonic() + 5.0
        while time.monotonic() < ends_s and self._job.poll() is None:
            if _losses(self._tail.more()) > known:
                return
            time.sleep(0.02)

    def _who_may_die(self, events: list[dict[str, Any]]) -> list[int]:
        """Members without whom each layer keeps a holder, in every layout that may still count."""
        decided = [event for event in events if event["event"] == "decision"]
        begun = [event for event in events if event["event"] == "generation_started"]
        if not decided or not begun:
            return []
        dead = _dead(events)
        counts = [e for e in decided if e["generation"] >= begun[-1]["generation"] - 1]
        return [
            rank
            for rank in begun[-1]["members"]
            if rank != SPARED
            and rank not in dead
            and all(
                set(holders) - dead - {rank} for event in counts for holders in event["layout"]["holders"]
            )
        ]

    def _usage(self) -> dict[int, dict[str, int]]:
        """By process, the agent's and all ranks': once all are back, and the groups of ended generations are gone."""
        seen, quiet_since_s = -1, time.monotonic()
        while time.monotonic() - quiet_since_s < _BURIED_S:
            time.sleep(0.2)
            begun = sum(event["event"] == "generation_started" for event in self._tail.more())
            if begun > seen:
                seen, quiet_since_s = begun, time.monotonic()
        pids = _pids(self._tail.events)
        return {pid: usage(pid) for pid in (self._job.pid, *(pids[rank] for rank in range(RANKS)))}


def growth(first: dict[int, dict[str, int]], last: dict[int, dict[str, int]], agent: int) -> dict[str, int]:
    """ "threads of a rank" and so on -> the greatest growth: of each process beside itself, or beside the fullest rank
    where it is newer.
    """
    found: dict[str, int] = {}
    for pid, now in last.items():
        who = "the agent" if pid == agent else "a rank"
        for what, count in now.items():
            fullest = max(one[what] for other, one in first.items() if other != agent)
            before = first[pid][what] if pid in first else fullest
            name = f"{what} of {who}"
            found[name] = max(found.get(name, count - before), count - before)
    return found


def _losses(events: list[dict[str, Any]]) -> int:
    return sum(event["event"] == "failure_detected" for event in events)


def _pids(events: list[dict[str, Any]]) -> dict[int, int]:
    return {event["target"]: event["pid"] for event in events if event["event"] == "rank_started"}


def _dead(events: list[dict[str, Any]]) -> set[int]:
    """Ranks that have died and are not filled yet."""
    dead: set[int] = set()
    for event in events:
        if event["event"] == "failure_detected":
            dead |= set(event["dead"])
        elif event["event"] == "switched":
            dead.discard(event["rank"])
    return dead


def stalls(events: list[dict[str, Any]]) -> list[float]:
    """Of each recovery, from the coordinator's notice to the last rank's first instruction (seconds)."""
    return sorted(row.stall_s for row in recoveries(events) if row.dead and row.stall_s is not None)


def norm_difference(ours: Sequence[CommittedStep], theirs: Sequence[CommittedStep]) -> float:
    """The largest, relative; infinite where one was not journalled."""
    other = {step.step: step.grad_norm for step in theirs}
    return max(
        (
            math.inf
            if step.grad_norm is None or not (norm := other.get(step.step))
            else abs(step.grad_norm - norm) / norm
            for step in ours
        ),
        default=math.inf,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", default="", help="folder for the two runs; default: a temporary one")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        steps = STEPS_A_KILL * args.kills
        # On two ranks it takes least, and no layout changes a result.
        undisturbed = start(folder / "undisturbed", steps, 2, 1)
        if undisturbed.wait():
            sys.exit((folder / "undisturbed" / "log").read_text()[-3000:])
        checks = ("--check-weight-hash-across-dp-replicas-interval", "1")
        job = start(folder / "shot-at", steps, RANKS, STAGES, "--odyssey-respawn", "10000", *checks)
        gunman = Gunman(job, folder / "shot-at", args.seed)
        gunman.fire(args.kills)
        code = job.wait()
        if code:
            sys.stderr.write((folder / "shot-at" / "log").read_text()[-5000:])
        return report(folder, code, gunman, args.kills, steps, as_json=args.json)


def report(folder: Path, code: int, gunman: Gunman, kills: int, steps: int, *, as_json: bool) -> int:
    """Prints what came out of it; returns the exit code."""
    events = last_job(list(read_journal(folder / "shot-at")))
    ours, theirs = read_run(folder / "shot-at").steps, read_run(folder / "undisturbed").steps
    recoveries = stalls(events)
    bars = [
        exactly("exit code", code, 0),
        at_least("kills and hangs", len(gunman.shot), kills),
        at_most("lost steps", steps - len({one.step for one in ours}), 0),
        at_most(
            "largest relative loss difference (float64)", loss_difference(ours, theirs).max_relative, 1e-10
        ),
        at_most("largest relative difference of gradient norms", norm_difference(ours, theirs), 1e-10),
        at_most("holders left out", sum(event["event"] == "left_out" for event in events), 0),
        at_most("wrong samples", len(check_samples(events, ours).problems), 0),
        *(
            at_most(f"{name}, growth since a quarter of the kills", gunman.grown.get(name, math.nan), room)
            for what, room in ROOM.items()
            for name in (f"{what} of a rank", f"{what} of the agent")
        ),
    ]
    result = {
        "seed_shots": [f"{rank}:{name}" for rank, name in gunman.shot],
        "steps": steps,
        "hangs": sum(name == "STOP" for _, name in gunman.shot),
        "rejoined": sum(event["event"] == "rank_joined" for event in events),
        "generations": max(event["generation"] for event in events),
        "recovery_s": {
            "count": len(recoveries),
            "median": statistics.median(recoveries) if recoveries else math.nan,
            "slowest": max(recoveries, default=math.nan),
        },
        "grown": gunman.grown,
    }
    return finish(result, bars, as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
