"""SIGTERM: all ranks leave Megatron's loop behind the same iteration, with its save, and a later job goes on there."""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest

from odyssey_megatron.errors import EXIT_AS_ASKED
from tests.launch.jobserver import events, pid_of, wait_for
from tests.megatron_lm.jobs import MOCK, assert_same_iterations, behind_a_load


@pytest.mark.parametrize("to", ["the launcher", "one rank, with --exit-signal-handler"])
def test_sigterm_saves_and_the_next_job_goes_on_there(jobs, name, to):
    save = jobs.folder / f"{name}-save".replace(" ", "-").replace(",", "")
    run_dir = save.with_name("run-" + save.name)
    flags = f"{MOCK} --save {save} --save-interval 100000 --eval-interval 1000 --train-iters 400 --lr-decay-iters 400"
    flags += " --exit-signal-handler" if "rank" in to else ""
    job = jobs.start(run_dir.name, flags, ranks=4, stages=2)
    wait_for(lambda: len(events(run_dir, "step_committed")) > 3, 90, "some steps")
    os.kill(job.pid if "launcher" in to else pid_of(run_dir, 1), signal.SIGTERM)
    run = jobs.outcome(run_dir.name, job)
    assert run.exit_code == EXIT_AS_ASKED, run.log[-3000:]
    assert "exiting program after receiving SIGTERM" in run.log
    assert not run.killed
    last = run.iterations[-1].number
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == str(last)
    assert re.search(rf"ended after iteration {last}, as a signal asked", run.log)

    # With the same --train-iters: Megatron checks that the schedule is the one of the checkpoint.
    flags = f"{MOCK} --eval-interval 1000 --train-iters 400 --lr-decay-iters 400 --exit-interval {last + 2}"
    after = jobs.odyssey(f"after-{run_dir.name}", f"{flags} --load {save}", ranks=4, stages=2)
    assert after.exit_code == 0, after.log[-3000:]
    assert [one.number for one in after.iterations] == [last + 1, last + 2]
    whole = jobs.odyssey(f"whole-{run_dir.name}", flags, ranks=4, stages=2)
    assert_same_iterations(after.iterations, behind_a_load(whole.iterations[-2:]))


def test_megatrons_own_handler_does_not_take_its_place(other_jobs, name):
    """Slurm sends a signal to all processes of a node; with it each rank would end at once, and nothing be saved."""
    save = other_jobs.folder / f"{name}-save"
    flags = f"{MOCK} --save {save} --save-interval 100000 --eval-interval 1000 --train-iters 3000"
    flags += " --lr-decay-iters 3000 --exit-signal-handler-for-training"
    job = other_jobs.start(name, flags, ranks=4, stages=2)
    run_dir = other_jobs.folder / name
    wait_for(lambda: len(events(run_dir, "step_committed")) > 3, 90, "some steps")
    for pid in [job.pid, *(pid_of(run_dir, rank) for rank in range(4))]:
        os.kill(pid, signal.SIGTERM)
    run = other_jobs.outcome(name, job)
    assert run.exit_code == EXIT_AS_ASKED, run.log[-3000:]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == str(run.iterations[-1].number)
    assert "--exit-signal-handler-for-training" in run.log


def test_a_signal_ends_the_job_as_it_asks_though_the_save_folder_is_gone(jobs, name):
    """It has steps left, so it is to be queued again; nothing says that a GPU is broken."""
    save, run_dir = jobs.folder / f"{name}-save", jobs.folder / name
    flags = f"{MOCK} --save {save} --save-interval 100000 --eval-interval 1000 --train-iters 3000"
    job = jobs.start(name, f"{flags} --lr-decay-iters 3000", ranks=4, stages=2)
    wait_for(lambda: len(events(run_dir, "step_committed")) > 3, 90, "some steps")
    shutil.rmtree(save)
    save.touch()
    os.kill(job.pid, signal.SIGUSR1)
    run = jobs.outcome(name, job)
    assert run.exit_code == EXIT_AS_ASKED, run.log[-3000:]
    last = run.iterations[-1].number
    assert f"THE CHECKPOINT OF ITERATION {last} WAS NOT SAVED" in run.log
    assert (
        f"ended after iteration {last}, as a signal asked it to. Its last checkpoint could not be saved"
        in run.log
    )
    assert "given up" not in run.log
