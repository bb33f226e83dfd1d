"""--async-save: steps go on while a checkpoint is written, on a slow disk, a full one, and while ranks die."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from odyssey_megatron.errors import EXIT_NOT_SAVED
from odyssey_megatron.mcore.loop.saving import damage
from tests.launch.jobserver import CHECKOUT, events, wait_for
from tests.megatron_lm.jobs import MOCK, assert_same_iterations, assert_same_lines, checkpoint

BESIDE = f"{MOCK} --async-save --save-interval 3"
SCHEDULED, SAVED = (
    "scheduled an async checkpoint save at iteration",
    "successfully saved checkpoint from iteration",
)


def slowly(seconds: float) -> list[str]:
    """What runs a script whose checkpoints' files take so long."""
    return [str(CHECKOUT / "tests" / "megatron_lm" / "slow.py"), str(seconds)]


def said(log: str, words: str) -> list[int]:
    """The iterations of which they were said."""
    return [int(one) for one in re.findall(rf"{words} +(\d+)", log)]


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if not one.name.startswith(".odyssey.lock-"))


def assert_only(folder: Path, iterations: list[int]) -> None:
    assert names(folder) == [f"iter_{one:07d}" for one in iterations] + ["latest_checkpointed_iteration.txt"]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(iterations[-1])
    assert [damage(folder / f"iter_{one:07d}") for one in iterations] == [[] for _ in iterations]


def test_steps_go_on_and_what_is_written_is_what_was(jobs, name):
    """To the bit what a job writes that waits for it."""
    beside, waiting = jobs.folder / f"{name}-beside", jobs.folder / f"{name}-waiting"
    flags = f"{BESIDE} --use-persistent-ckpt-worker --save {beside}"
    run = jobs.odyssey(name, flags, ranks=4, stages=2, before=slowly(1.5))
    assert_same_lines(run, jobs.plain(ranks=6, stages=2))
    assert said(run.log, SCHEDULED) == said(run.log, SAVED) == [3, 6]
    between = run.log[run.log.index(SCHEDULED) : run.log.index(SAVED)]
    assert "iteration        4/" in between
    assert_only(beside, [3, 6])
    other = jobs.odyssey(f"{name}-w", f"{MOCK} --save {waiting} --save-interval 3", ranks=4, stages=2)
    assert other.exit_code == 0, other.log[-3000:]
    for iteration in (3, 6):
        ours, theirs = checkpoint(beside, iteration), checkpoint(waiting, iteration)
        tensors = {key for key, value in theirs.items() if isinstance(value, torch.Tensor)}
        assert len(tensors) > 20
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in tensors)


DEATHS = {
    # seconds for a file; who dies; saves begun, and those that became checkpoints
    "in-a-step": (1.5, "rank=2,step=4,at=backward", [3, 5, 6], [5, 6]),
    "in-an-optimizer-step": (1.5, "rank=0,step=3,at=optimizer", [3, 5, 6], [5, 6]),
    "before-it-is-planned": (0.0, "rank=0,step=3,at=checkpoint", [3, 6], [3, 6]),
    "as-it-is-completed": (0.0, "rank=0,step=4,at=checkpoint", [3, 4, 6], [4, 6]),
}


@pytest.mark.parametrize("when", DEATHS)
def test_what_a_death_cuts_short_is_saved_again(jobs, name, when):
    seconds, inject, begun, saved = DEATHS[when]
    folder = jobs.folder / f"{name}-saved"
    flags = f"{BESIDE} --save {folder} --use-distributed-optimizer"
    run = jobs.odyssey(name, flags, ranks=6, stages=2, inject=inject, before=slowly(seconds))
    assert_same_lines(run, jobs.plain(ranks=6, stages=2))
    assert len(run.killed) == 1
    assert said(run.log, "saving checkpoint at iteration") == begun
    assert said(run.log, SAVED) == saved
    assert_only(folder, saved)
    load = f"{MOCK} --use-distributed-optimizer --load {folder} --ckpt-step {saved[0]} --exit-interval 1"
    (resumed,) = jobs.plain(load, ranks=2, stages=1).iterations
    whole = jobs.plain(ranks=6, stages=2).iterations[saved[0]]
    assert_same_iterations([resumed], [whole])


@pytest.mark.matrix
def test_who_comes_back_waits_for_what_is_written(jobs, name):
    folder = jobs.folder / f"{name}-saved"
    flags = f"{BESIDE} --save {folder} --train-iters 40 --lr-decay-iters 40 --eval-iters 0"
    inject = "rank=2,step=4,at=backward;rank=3,step=12,at=forward"
    run = jobs.odyssey(
        name, f"{flags} --odyssey-respawn 1", ranks=6, stages=2, inject=inject, before=slowly(1.0)
    )
    plain = jobs.plain(f"{MOCK} --train-iters 40 --lr-decay-iters 40 --eval-iters 0", ranks=6, stages=2)
    assert_same_lines(run, plain)
    assert run.killed == [2, 3]
    assert len(run.named("switched")) > 0
    assert_only(folder, said(run.log, SAVED))


@contextlib.contextmanager
def disk(path: Path, kib: int) -> Iterator[Path]:
    """A small one of its own."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a disk can only be mounted by root: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.parametrize("beside", ["--async-save", ""], ids=["beside", "waiting"])
@pytest.mark.parametrize(("kib", "saved"), [(1600, [3]), (8, [])], ids=["data", "first-file"])
def test_a_full_disk_is_said_and_training_goes_on(jobs, name, beside, kib, saved):
    with disk(jobs.folder / f"{name}-disk", kib) as folder:
        run = jobs.odyssey(name, f"{MOCK} {beside} --save-interval 3 --save {folder}", ranks=4, stages=2)
        assert [one for one in names(folder) if "iter_" in one] == [f"iter_{one:07d}" for one in saved]
        assert not any(damage(folder / f"iter_{one:07d}") for one in saved)
    assert run.exit_code == EXIT_NOT_SAVED, run.log[-3000:]
    assert run.killed == []
    assert said(run.log, "THE CHECKPOINT OF ITERATION") == [one for one in (3, 6) if one not in saved]
    plain = jobs.plain(ranks=6, stages=2)
    assert_same_iterations(run.iterations, plain.iterations)


def test_a_folder_that_is_gone_is_said_and_training_goes_on(jobs, name):
    """Where it was there is a file. A job that starts with one is refused (tests/mcore/test_saving.py)."""
    folder = jobs.folder / f"{name}-saved"
    job = jobs.start(name, f"{BESIDE} --save {folder} --log-progress", ranks=4, stages=2)
    wait_for(lambda: events(jobs.folder / name, "generation_started"), 90, "the first step")
    shutil.rmtree(folder)  # with Megatron's progress log
    folder.touch()
    run = jobs.outcome(name, job)
    assert run.exit_code == EXIT_NOT_SAVED, run.log[-3000:]
    assert run.killed == []
    assert said(run.log, "THE CHECKPOINT OF ITERATION") == [3, 6]
    assert [one.number for one in run.iterations] == [1, 2, 3, 4, 5, 6]
