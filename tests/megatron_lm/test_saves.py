"""Ranks killed from outside at random moments of a save: the checkpoint is complete, or it is not there.

    MEGATRON_LM_PATH=... bash tests/run.sh -m matrix tests/megatron_lm/test_saves.py

``ODYSSEY_SEED`` is the seed of victims and moments; each case prints what it has drawn.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from datetime import datetime

import pytest

from odyssey_megatron.errors import EXIT_LAYERS_LOST
from odyssey_megatron.mcore.loop import saving
from tests.launch.jobserver import pid_of
from tests.megatron_lm.jobs import FLOAT32, MOCK, NORM_BFLOAT16, assert_same_iterations

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

SEED = int(os.environ.get("ODYSSEY_SEED", "20261122"))
RANKS, STAGES, ITERATIONS = 8, 2, 18
SAVED = (2, 4, 6, 8, 10, 12)
FINAL = tuple(range(2, ITERATIONS + 1, 2))
QUICK = (
    f"{MOCK} --num-layers 2 --eval-iters 0 --global-batch-size 4 --train-iters {ITERATIONS} "
    f"--lr-decay-iters {ITERATIONS}"
)
PATIENT = "--odyssey-hang-s 20 --odyssey-build-timeout-s 60"
"""Nobody but those who are shot is lost, however busy the machine."""
ALTERNATING = ((0,), (1,), (0,), (1,), (0,), (1,))
SHARED = "--use-distributed-optimizer"
STATES = {
    # flags; those of the plain job that loads; in each save the stages of those who die; jobs; tolerance
    "replicated": ("", "", ALTERNATING, 4, FLOAT32),
    "distributed-optimizer": (SHARED, SHARED, ALTERNATING, 4, FLOAT32),
    "bf16": ("--bf16", "--bf16", ALTERNATING, 3, 2e-3),
    "two-at-once": ("", "", ((0, 1), (0, 0), (1, 1)), 4, FLOAT32),
    "tensor-parallel": ("--tensor-model-parallel-size 2 --sequence-parallel", "", ((0,), (1,)), 4, FLOAT32),
    "constant-structure": ("--ckpt-assume-constant-structure", "", ALTERNATING, 1, FLOAT32),
    "beside-training": (f"--async-save {SHARED}", SHARED, ALTERNATING, 4, FLOAT32),
}
"""24 + 24 + 18 + 24 + 8 + 6 + 24 = 128 deaths."""
CASES = [f"{state}-{one}" for one in range(4) for state, (*_, jobs, _) in STATES.items() if one < jobs]


def await_line(job, line, timeout_s=180.0):
    """Whether it comes before the job ends. Polled finely: what comes after it is timed."""
    ends_s = time.monotonic() + timeout_s
    while line not in (log := job.log()):
        if "no holder is left" in log:
            return False
        assert time.monotonic() < ends_s, f"{line}: not within {timeout_s} s\n{log[-3000:]}"
        time.sleep(0.002)
    return True


def begins(iteration):
    return f"saving checkpoint at iteration {iteration:7d} "


def save_s(log):
    """How long saves took that nobody disturbed: from Megatron's first word about each to its last."""
    found = re.findall(r"\[(\S+ [\d:.]+)\] (?:saving|successfully saved)", log)
    times = [datetime.fromisoformat(one).timestamp() for one in found]
    return [last - first for first, last in zip(times[::2], times[1::2], strict=True)]


@pytest.fixture(scope="module")
def typical_s(jobs):
    folder = jobs.folder / "saves-undisturbed"
    run = jobs.odyssey(
        "saves-timed", f"{QUICK} --save {folder} --save-interval 2 {PATIENT}", ranks=RANKS, stages=STAGES
    )
    assert run.exit_code == 0, run.log[-4000:]
    taken_s = save_s(run.log)
    print(f"undisturbed saves took {taken_s} s")
    return statistics.median(taken_s)


def assert_nothing_else(folder, iterations):
    assert sorted(one.name for one in folder.iterdir() if not one.name.startswith(".odyssey.lock-")) == [
        *(f"iter_{one:07d}" for one in iterations),
        "latest_checkpointed_iteration.txt",
    ]
    for one in iterations:
        assert saving.damage(folder / f"iter_{one:07d}") == []


def assert_load(jobs, name, folder, iterations, state):
    """Into plain Megatron-LM, in another layout: the next iteration is that of a run that never stopped."""
    trained, flags, *_, tolerance = STATES[state]
    whole = jobs.plain(f"{QUICK} {trained}", ranks=4 if "tensor" in trained else 2, stages=STAGES)
    for iteration in iterations:
        load = f"{QUICK} {flags} --load {folder} --ckpt-step {iteration} --exit-interval 1"
        run = jobs.plain_once(f"{name}-loads-{iteration}", load, ranks=1, stages=1)
        assert run.exit_code == 0, run.log[-4000:]
        expected, norm_rel = [whole.iterations[iteration]], NORM_BFLOAT16 if state == "bf16" else None
        assert_same_iterations(run.iterations, expected, rel=tolerance, norm_rel=norm_rel)


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_is_complete_and_loads_into_plain_megatron_lm(jobs, name, typical_s, case):
    state = case.rpartition("-")[0]
    flags, _, deaths, *_ = STATES[state]
    draw = random.Random(f"{SEED}-{case}")
    folder = jobs.folder / f"{name}-saved"
    width = 2 if "tensor" in flags else 1
    cells = {stage: [0, 1, 2, 3][::width] for stage in range(STAGES)}
    policy = "reroute" if int(case[-1]) % 2 else "auto"
    train = f"{QUICK} {flags} --save {folder} --save-interval 2 --odyssey-policy {policy} {PATIENT}"
    job = jobs.start(name, train, ranks=RANKS, stages=STAGES)
    killed, shot = [], []
    for iteration, stages in zip(SAVED, deaths, strict=False):
        victims = [4 * stage + cells[stage].pop(draw.randrange(len(cells[stage]))) for stage in stages]
        victims = [one + draw.randrange(width) for one in victims]
        if not await_line(job, begins(iteration)):
            break
        after_s = draw.uniform(0.0, 1.1) * typical_s
        time.sleep(after_s)
        for rank in victims:
            os.kill(pid_of(jobs.folder / name, rank), signal.SIGKILL)
        killed += victims
        shot.append(iteration)
        print(f"seed {SEED}: rank(s) {victims} {1e3 * after_s:.0f} ms into the save of iteration {iteration}")
    run = jobs.outcome(name, job)
    print(
        f"policy {policy}, exit code {run.exit_code}, saves begun: {[run.log.count(begins(one)) for one in shot]}"
    )
    print(f"stalls: {[round(one.stall_s, 3) for one in run.run.recoveries if one.stall_s is not None]} s")
    named = sorted(int(one.name[5:]) for one in folder.glob("iter_*"))
    if state == "beside-training":  # another step's is saved in place of what was cut short
        shot = [one for one in named if one < ITERATIONS]
    if (
        run.exit_code == EXIT_LAYERS_LOST
    ):  # moved by --odyssey-policy auto, a layer had been left to the victims
        latest = int((folder / "latest_checkpointed_iteration.txt").read_text())
        shot = [one for one in shot if one <= latest]
    else:
        assert run.exit_code == 0, run.log[-4000:]
        assert set(killed) <= set(run.killed)
        assert_nothing_else(folder, named if state == "beside-training" else FINAL)
        assert named[-1] == ITERATIONS
    assert_load(jobs, name, folder, shot, state)
    print(f"loaded: {shot}")


@pytest.mark.parametrize("case", range(10))
def test_a_job_that_ends_altogether_leaves_the_checkpoint_before_or_this_one(jobs, name, typical_s, case):
    draw = random.Random(f"{SEED}-{case}")
    folder = jobs.folder / f"{name}-saved"
    job = jobs.start(name, f"{QUICK} --save {folder} --save-interval 2 {PATIENT}", ranks=RANKS, stages=STAGES)
    await_line(job, begins(4))
    after_s = draw.uniform(0.0, 1.1) * typical_s
    time.sleep(after_s)
    job.kill()
    jobs.outcome(name, job)
    latest = int((folder / "latest_checkpointed_iteration.txt").read_text())
    print(
        f"seed {SEED}: the job killed {1e3 * after_s:.0f} ms into the save of iteration 4: {latest} is the latest"
    )
    assert latest in (2, 4)
    assert_load(jobs, name, folder, [latest], "replicated")
    # The next job removes what was left, and saves again.
    again = f"{QUICK} {PATIENT} --load {folder} --save {folder} --save-interval 2"
    assert jobs.odyssey(f"{name}-again", again, ranks=4, stages=STAGES).exit_code == 0
    assert_nothing_else(folder, FINAL)
