"""``--odyssey observe``: Megatron-LM as it is, and what Odyssey would have done about its failure."""

from __future__ import annotations

import os
import signal

from tests.launch.jobserver import events, pid_of, wait_for
from tests.megatron_lm.jobs import MOCK, assert_same_lines


def test_nothing_of_training_is_changed(jobs, name):
    run = jobs.odyssey(name, ranks=4, stages=2, mode="observe")
    assert_same_lines(run, jobs.plain(ranks=4, stages=2), rel=0.0)
    assert not run.killed


def test_a_death_is_thought_through_and_ends_the_job(jobs, name):
    job = jobs.start(name, f"{MOCK} --train-iters 500", ranks=4, stages=2, mode="observe")
    wait_for(lambda: "iteration        2/" in job.log(), 60.0, "the second iteration")
    os.kill(pid_of(jobs.folder / name, 1), signal.SIGKILL)
    run = jobs.outcome(name, job)
    assert run.exit_code == 1, run.log[-3000:]
    assert run.killed == [1]
    assert events(jobs.folder / name, "job_started")[0]["observes"]
    table = run.log.index("candidate")
    assert "reroute" in run.log[table:]
    assert "the loss of rank(s) [1] ends the job, since --odyssey observe only looks on" in run.log
    assert "--odyssey recover would have gone on as decided above." in run.log


def test_what_recover_would_refuse_is_said(jobs, name):
    run = jobs.odyssey(
        name, f"{MOCK} --check-for-spiky-loss --exit-interval 1", ranks=2, stages=2, mode="observe"
    )
    assert run.exit_code == 0, run.log[-3000:]
    assert run.log.count("--odyssey recover would refuse this job: --check-for-spiky-loss") == 1
