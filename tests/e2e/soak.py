"""A job that is shot at for long: random kills and hangs from a seed, at random moments; all that die come back.

    python tests/e2e/soak.py --kills 200 [--seed 1] [--json]
    MEGATRON_LM_PATH=... python tests/e2e/soak.py --kills 200 --surroundings [--json]       # needs root

One small Megatron job (PP2 x DP3, float64) with --odyssey-respawn, beside the same without failures. Whoever may die
without taking the last copy of a layer along may be hit at any moment: in a step, in a recovery, while it is filled.
After every step the job checks that all holders of a layer have the same bytes.
The agent, and the processes of all ranks at the end, must not have more than at a quarter of the kills: one that has
lived that long (one rank is spared) than itself then, a newer one than the fullest then. A signal ends it after that.

With ``--surroundings`` the job is Megatron-LM's, which saves checkpoints, and some ranks are killed while it is frozen,
while its disk is full, as its run folder is deleted, or while strangers connect (``around.py``). Then every checkpoint
must be that of the run without failures, and no file is left anywhere.
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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "benchmarks")]

from bars import Bar, at_least, at_most, exactly, finish, largest_difference, norm_difference

from odyssey_megatron.errors import EXIT_AS_ASKED
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.recoveries import recoveries
from odyssey_megatron.metrics.run import read_run
from odyssey_megatron.metrics.steps import CommittedStep, check_samples, loss_difference
from odyssey_megatron.metrics.timeline import last_job
from tests.e2e.around import Around, left_behind, small_disk
from tests.e2e.test_leaks import usage
from tests.launch.test_survival import is_running

RANKS, STAGES, SPARED = 6, 2, 3
STEPS_A_KILL, SPARE_STEPS = 12, 1000
"""A job has so many for each kill, and so many more. It trains until its processes were looked at behind the last kill,
which takes longest where kills are few; a signal ends it then.
"""
BURIED_S, BURIED_OF_MEGATRON_LM_S = 6.0, 65.0
"""By then messages that gloo did not end (docs/not-yet.md) have reached their limit: 3 s, or a minute."""
ENDS_IF_ASKED = ("--odyssey-on-sigterm", "save")
EVERY_STEP = ("--check-weight-hash-across-dp-replicas-interval", "1")
_WANTED = {
    "step_committed", "failure_detected", "decision", "generation_started", "rank_started", "switched"
}  # fmt: skip
ROOM = {"threads": 8, "fds": 16, "rss_kib": 16 * 1024}
"""By so much a process may have grown. A leak of each recovery would be some hundred times that of one."""
HANGS = 0.1
"""Of the faults, so many are SIGSTOP."""
AROUND = 0.35
"""Of the kills with ``--surroundings``, so many fall into something that goes wrong around the job."""
SAVE_EVERY = 40
CALM = "--lr 1e-4 --min-lr 1e-4"
"""With 1e-2, losses of 1e-3 after 900 steps, the last digit's differences grow by a factor of ten in 100 steps, with a
failure or without."""
ENDS_WITHIN_S = 120.0
"""From the signal that asks for it to the end of the job, with its last checkpoint."""
FLAGS = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --odyssey-device cpu --odyssey-float64 on "
    "--odyssey-hang-s 1.0 --odyssey-op-timeout-s 3"
)


def example(steps: int) -> tuple[str, list[str]]:
    """(what to preload, script with its arguments)."""
    return "odyssey_megatron.mcore.cpu.preload", [
        "examples/llama/pretrain_llama.py", *FLAGS.split(), "--train-iters", str(steps),
    ]  # fmt: skip


def megatron_lm(steps: int, saved: Path) -> tuple[str, list[str]]:
    """The same of an unmodified Megatron-LM job that saves."""
    from tests.megatron_lm.jobs import MOCK, MODEL

    script = str(Path(os.environ["MEGATRON_LM_PATH"]) / "pretrain_gpt.py")
    flags = (
        f"{MODEL} {MOCK} {CALM} --odyssey recover --odyssey-device cpu --odyssey-float64 on --odyssey-hang-s 2 "
        f"--distributed-timeout-minutes 1 --eval-interval 50 --eval-iters 1 --train-iters {steps} "
        f"--save {saved} --save-interval {SAVE_EVERY}"
    )
    return "tests.megatron_lm.preload", [script, *flags.split()]


def start(
    trains: tuple[str, list[str]], run_dir: Path, log: Path, ranks: int, stages: int, *flags: str, **env: str
) -> subprocess.Popen[bytes]:
    """The job, with more flags and variables."""
    preload, script = trains
    command = [sys.executable, "-m", "odyssey_megatron", "run", "--nproc-per-node", str(ranks)]
    command += ["--preload", preload, *script, "--pipeline-model-parallel-size", str(stages)]
    command += ["--odyssey-run-dir", str(run_dir), "--data-cache-path", str(log.parent / "cache"), *flags]
    whole = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(CHECKOUT), "ODYSSEY_DEVICE": "cpu", **env,
    }  # fmt: skip
    with log.open("w") as out:
        return subprocess.Popen(command, cwd=CHECKOUT, env=whole, stdout=out, stderr=out)


class Tail:
    """The journal of a running job, read on as it grows, and kept: its files may be deleted."""

    def __init__(self, run_dir: Path, kept: Path):
        self._folder, self._kept = run_dir / "journal", kept / "journal"
        self._kept.mkdir(parents=True)
        self._open: dict[tuple[int, int], tuple[str, Any]] = {}
        self._rest: dict[tuple[int, int], bytes] = {}
        self.events: list[dict[str, Any]] = []

    def more(self) -> list[dict[str, Any]]:
        """All events so far, in order."""
        for path in self._folder.glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                if (found.st_dev, found.st_ino) not in self._open:
                    file = path.open("rb")
                    found = os.fstat(file.fileno())
                    self._open[found.st_dev, found.st_ino] = path.name, file
        new = []
        for key, (name, file) in self._open.items():
            *lines, self._rest[key] = (self._rest.get(key, b"") + file.read()).split(b"\n")
            if lines:
                with (self._kept / name).open("ab") as out:
                    out.write(b"\n".join([*lines, b""]))
            for line in lines:
                with contextlib.suppress(ValueError):  # torn
                    new.append(json.loads(line))
        kept = [event for event in new if event["event"] in _WANTED]
        self.events += sorted(kept, key=lambda event: event["wall_s"])
        return self.events


class Gunman:
    """Kills and stops ranks of a running job, but never the last holder of a layer."""

    def __init__(self, job: subprocess.Popen[bytes], tail: Tail, seed: int, around: Around | None = None):
        self._job, self._tail, self._rng, self._around = job, tail, random.Random(seed), around
        self._buried_s = BURIED_OF_MEGATRON_LM_S if around else BURIED_S
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
        name, around = "STOP" if self._rng.random() < HANGS else "KILL", contextlib.nullcontext()
        if self._around is not None and self._rng.random() < AROUND:
            name, around = "KILL", self._around.any()
        with around, contextlib.suppress(ProcessLookupError):
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
        while time.monotonic() - quiet_since_s < self._buried_s:
            time.sleep(0.2)
            events = self._tail.more()
            pids = _pids(events)
            begun = sum(event["event"] == "generation_started" for event in events)
            if begun > seen or not all(map(is_running, pids.values())):
                seen, quiet_since_s = begun, time.monotonic()
            if (code := self._job.poll()) is not None:
                sys.exit(
                    f"the job has ended with exit code {code} after {len(self.shot)} kills, before it was seen what "
                    "its processes hold. If its steps were through (exit code 0), raise SPARE_STEPS."
                )
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


def _committed(events: list[dict[str, Any]]) -> set[int]:
    return {event["step"] for event in events if event["event"] == "step_committed"}


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", default="", help="folder for the two runs; default: a temporary one")
    parser.add_argument("--surroundings", action="store_true", help="what surrounds the job goes wrong, too")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        run = surrounded if args.surroundings else alone
        result, bars = run(folder, args.kills, args.seed)
    return finish(result, bars, as_json=args.json)


def alone(folder: Path, kills: int, seed: int) -> tuple[dict[str, Any], list[Bar]]:
    """The job on a machine that does nothing to it."""
    trains = example(STEPS_A_KILL * kills + SPARE_STEPS)
    run_dir, log = folder / "shot-at", folder / "shot-at.log"
    flags = ("--odyssey-respawn", "10000", *ENDS_IF_ASKED, *EVERY_STEP)
    job = start(trains, run_dir, log, RANKS, STAGES, *flags)
    gunman = Gunman(job, Tail(run_dir, folder / "seen"), seed)
    if (code := shot_at(job, gunman, kills)) != EXIT_AS_ASKED:
        sys.stderr.write(log.read_text()[-5000:])
    events = last_job(list(read_journal(run_dir)))
    ours = read_run(run_dir).steps
    steps = 1 + max((one.step for one in ours), default=-1)
    # On two ranks it takes least, and no layout changes a result.
    whole = start(trains, folder / "undisturbed", folder / "undisturbed.log", 2, 1, *ENDS_IF_ASKED)
    train_as_far(whole, folder, steps)
    theirs = read_run(folder / "undisturbed").steps
    compared = {one.step for one in ours} & {one.step for one in theirs}
    bars = [
        exactly("exit code", code, EXIT_AS_ASKED),
        at_most("lost steps", steps - len(compared), 0),
        at_most("wrong samples", len(check_samples(events, ours).problems), 0),
    ]
    return described(events, gunman, steps), [*bars, *common_bars(events, gunman, kills, ours, theirs)]


def shot_at(job: subprocess.Popen[bytes], gunman: Gunman, kills: int) -> int:
    """The exit code of the job, which is asked to end after the last kill."""
    try:
        gunman.fire(kills)
        job.terminate()
        return job.wait(ENDS_WITHIN_S)
    finally:
        job.kill()


def train_as_far(job: subprocess.Popen[bytes], folder: Path, steps: int) -> None:
    """Let the job train ``steps`` steps without failures, and end it."""
    tail = Tail(folder / "undisturbed", folder / "seen-undisturbed")
    try:
        while job.poll() is None and len(_committed(tail.more())) <= steps:
            time.sleep(0.2)
        job.terminate()
        if job.wait(ENDS_WITHIN_S) not in (0, EXIT_AS_ASKED):
            sys.exit((folder / "undisturbed.log").read_text()[-3000:])
    finally:
        job.kill()


def surrounded(folder: Path, kills: int, seed: int) -> tuple[dict[str, Any], list[Bar]]:
    """A job that saves, in surroundings that go wrong; it is asked to end after the last kill."""
    if not os.environ.get("MEGATRON_LM_PATH") or os.geteuid():
        sys.exit("--surroundings needs root, for a small disk, and MEGATRON_LM_PATH, for a job that saves.")
    most, saved = 100 * STEPS_A_KILL * kills, (folder / "saved", folder / "saved-undisturbed")
    log, temporary = folder / "shot-at.log", folder / "temporary"
    temporary.mkdir()
    with small_disk(folder / "disk") as disk:
        run_dir, tail = disk.path / "run", Tail(disk.path / "run", folder / "seen")
        flags = ("--odyssey-respawn", "10000", *EVERY_STEP)
        job = start(megatron_lm(most, saved[0]), run_dir, log, RANKS, STAGES, *flags, TMPDIR=str(temporary))
        around = Around(job.pid, run_dir, disk, random.Random(seed))
        gunman = Gunman(job, tail, seed, around)
        if (code := shot_at(job, gunman, kills)) != EXIT_AS_ASKED:
            said = [line for line in log.read_text().splitlines() if line.startswith("[odyssey")]
            sys.exit("\n".join([*said[-60:], log.read_text()[-3000:], f"exit code {code}"]))
        tail.more()
    events = last_job(list(read_journal(folder / "seen")))
    pids = {event["pid"] for event in events if event["event"] == "rank_started"} | {job.pid}
    printed = iterations(folder, log)
    steps = max(printed, default=0)
    undisturbed = folder / "undisturbed", folder / "undisturbed.log"
    whole = start(megatron_lm(most, saved[1]), *undisturbed, STAGES, STAGES, "--exit-interval", str(steps))
    demand(whole, undisturbed[1])
    ours, theirs = read_run(folder / "seen").steps, read_run(undisturbed[0]).steps
    known = iterations(folder, undisturbed[1])
    bars = [
        at_most("iterations that are not printed, or twice", twice_or_not(printed, steps), 0),
        at_most("largest relative loss difference as printed", printed_difference(printed, known), 1e-6),
        at_least("share of steps whose losses are compared to all digits", len(ours) / max(steps, 1), 0.9),
        at_least("checkpoints", len(checkpoints(saved[0])), steps // SAVE_EVERY),
        at_most("checkpoints that are not as undisturbed", len(damaged(*saved)), 0),
        at_most("files left behind", len(left_behind(pids, temporary)), 0),
    ]
    result = described(events, gunman, steps) | {"around": dict(Counter(around.happened))}
    return result, [*bars, *common_bars(events, gunman, kills, ours, theirs)]


def demand(job: subprocess.Popen[bytes], log: Path) -> None:
    if job.wait():
        sys.exit(log.read_text()[-3000:])


def iterations(folder: Path, log: Path) -> dict[int, list[float]]:
    """Iteration -> the losses that Megatron-LM has printed of it."""
    from tests.megatron_lm.jobs import MegatronRun

    found: dict[int, list[float]] = {}
    for one in MegatronRun(exit_code=0, run_dir=folder, log=log.read_text()).iterations:
        found.setdefault(one.number, []).append(one.loss)
    return found


def twice_or_not(printed: dict[int, list[float]], steps: int) -> int:
    return sum(len(printed.get(number, ())) != 1 for number in range(1, steps + 1))


def printed_difference(ours: dict[int, list[float]], theirs: dict[int, list[float]]) -> float:
    known = [theirs[number][0] if number in theirs else None for number in ours]
    return largest_difference([losses[0] for losses in ours.values()], known)


def checkpoints(folder: Path) -> list[int]:
    """The iterations that were saved."""
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


def damaged(ours: Path, theirs: Path) -> list[str]:
    """What is wrong with each checkpoint that is not, to 1e-10, that of the undisturbed run."""
    from tests.megatron_lm.jobs import assert_equal_checkpoints

    found = []
    for iteration in checkpoints(ours):
        try:
            assert_equal_checkpoints(ours, theirs, iteration)
        except Exception as error:  # noqa: BLE001 - whatever loading raises
            found.append(f"iteration {iteration}: {error!r}")
            sys.stderr.write(found[-1] + "\n")
    return found


def common_bars(
    events: Sequence[dict[str, Any]],
    gunman: Gunman,
    kills: int,
    ours: Sequence[CommittedStep],
    theirs: Sequence[CommittedStep],
) -> list[Bar]:
    return [
        at_most("holders left out", sum(event["event"] == "left_out" for event in events), 0),
        at_least("kills and hangs", len(gunman.shot), kills),
        at_most(
            "largest relative loss difference (float64)", loss_difference(ours, theirs).max_relative, 1e-10
        ),
        at_most("largest relative difference of gradient norms", norm_difference(ours, theirs), 1e-10),
        *(
            at_most(f"{name}, growth since a quarter of the kills", gunman.grown.get(name, math.nan), room)
            for what, room in ROOM.items()
            for name in (f"{what} of a rank", f"{what} of the agent")
        ),
    ]


def described(events: list[dict[str, Any]], gunman: Gunman, steps: int) -> dict[str, Any]:
    slow = stalls(events)
    return {
        "seed_shots": [f"{rank}:{name}" for rank, name in gunman.shot],
        "steps": steps,
        "hangs": sum(name == "STOP" for _, name in gunman.shot),
        "rejoined": sum(event["event"] == "rank_joined" for event in events),
        "generations": max(event["generation"] for event in events),
        "recovery_s": {
            "count": len(slow),
            "median": statistics.median(slow) if slow else math.nan,
            "slowest": max(slow, default=math.nan),
        },
        "grown": gunman.grown,
    }


if __name__ == "__main__":
    sys.exit(main())
