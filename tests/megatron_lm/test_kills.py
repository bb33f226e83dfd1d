"""An unmodified Megatron-LM job that loses ranks prints what it would have printed without."""

from __future__ import annotations

import pytest

from odyssey_megatron.errors import EXIT_BAD_INPUT
from tests.e2e.jobs import assert_equal_numbers
from tests.megatron_lm import torchrun
from tests.megatron_lm.jobs import FLOAT64, MOCK, assert_equal_checkpoints, assert_same_lines, indexed

CASES = {
    "three-in-a-row": (8, 4, "rank=0,step=1,at=backward;rank=7,step=2,at=forward;rank=4,step=4,at=reduce"),
    "evaluation-and-checkpoint": (8, 4, "rank=7,step=3,at=evaluate;rank=0,step=4,at=checkpoint"),
    "two-at-once": (6, 2, "rank=0,step=2,at=forward;rank=5,step=2,at=forward"),
    "agreement-and-optimizer": (6, 2, "rank=2,step=1,at=agreement;rank=3,step=3,at=optimizer"),
    "commit-of-an-evaluated-step": (6, 2, "rank=5,step=2,at=commit;rank=4,step=5,at=commit"),
    "first-and-last-step": (6, 2, "rank=1,step=0,at=weight_grad;rank=0,step=5,at=backward"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_lines_are_those_of_plain_megatron_lm(jobs, name, case):
    ranks, stages, inject = CASES[case]
    save = f" --save {jobs.folder / name / 'saved'} --save-interval 4" if "checkpoint" in inject else ""
    run = jobs.odyssey(name, MOCK + save, ranks=ranks, stages=stages, inject=inject)
    assert_same_lines(run, jobs.plain(ranks=ranks, stages=stages))
    assert len(run.killed) == inject.count("rank="), run.log[-3000:]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("rank=1,step=6,at=backward", "the job has 6 step(s), which count from 0"),
        ("rank=1,step=2,at=exchange", "Add --odyssey-time-links on"),
        ("rank=1,step=2,at=param_gather", "Add --use-distributed-optimizer"),
    ],
    ids=["step", "links", "slices"],
)
def test_a_fault_that_the_job_never_comes_to_is_refused(jobs, name, fault, message):
    run = jobs.odyssey(name, ranks=2, stages=1, inject=fault)
    assert run.exit_code == EXIT_BAD_INPUT, run.log[-3000:]
    assert run.log.count(message) == 1, run.log[-3000:]
    assert not run.killed


def test_the_last_evaluation_is_behind_the_last_step(jobs, name):
    """A fault there strikes; what was to strike in a save is named, as there is none."""
    left = "rank=0,step=6,at=checkpoint"
    run = jobs.odyssey(name, ranks=4, stages=2, inject=f"rank=1,step=6,at=evaluate;{left}")
    assert_same_lines(run, jobs.plain(ranks=4, stages=2))
    assert run.killed == [1]
    assert (
        f"no record that 1 fault(s) struck, so this job does not show that it survives them: {left}\n"
        in run.log
    )


def test_a_profiled_rank_dies(jobs, name):
    """The next one gets its number in Megatron, and not its profiler."""
    profile = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 --profile-ranks 0"
    flags = f"{MOCK} {profile} --tensorboard-dir {jobs.folder / name / 'board'}"
    run = jobs.odyssey(name, flags, ranks=4, stages=2, inject="rank=0,step=3,at=backward")
    assert_same_lines(run, jobs.plain(ranks=4, stages=2))
    assert run.killed == [0]


@pytest.fixture(scope="session")
def corpus(jobs):
    """The prefix of an indexed dataset of bytes."""
    from pydoc_data.topics import topics

    # 2 % of them, the test set, must be some.
    return indexed(jobs.folder / "corpus" / "topics", [text.encode() for _, text in sorted(topics.items())])


@pytest.mark.timeout(300)
def test_under_torchrun_in_a_patched_checkout(jobs, tmp_path, corpus):
    flags = f"--data-path {corpus}"
    run = torchrun.run(
        jobs, tmp_path, flags, ranks=6, stages=2, inject="rank=5,step=2,at=backward;rank=0,step=3,at=evaluate"
    )
    assert_same_lines(run, jobs.plain(flags, ranks=6, stages=2))
    assert run.killed == [0, 5]


def test_an_indexed_dataset_and_cells(jobs, name, corpus):
    flags = f"--data-path {corpus} --tensor-model-parallel-size 2"
    inject = "rank=2,step=1,at=forward;rank=5,step=3,at=reduce"
    run = jobs.odyssey(name, flags, ranks=8, stages=2, inject=inject)
    assert_same_lines(run, jobs.plain(flags, ranks=8, stages=2))
    assert run.killed == [2, 3, 4, 5]


@pytest.mark.timeout(480)
def test_a_cell_has_run_ahead(jobs, name):
    """One pipeline of two cells: the second one has run forwards of the first, and the first of the second."""
    flags = f"{MOCK} --tensor-model-parallel-size 2 --global-batch-size 24"
    for attempt in range(4):
        run = jobs.odyssey(
            f"{name}-{attempt}", f"{flags} --odyssey-redundancy compute", ranks=4, stages=2,
            inject="rank=1,step=2,at=backward,microbatch=12",
        )  # fmt: skip
        assert_same_lines(run, jobs.plain(flags, ranks=4, stages=2))
        assert run.killed == [0, 1]
        (recovery,) = run.run.recoveries
        if recovery.outcome == "resume":
            break  # otherwise the two ranks of the other cell were not equally far, which is up to chance
    assert recovery.outcome == "resume", "four times the step was done again"
    assert recovery.eager_forwards > 0


def test_an_indexed_dataset(jobs, name, corpus):
    flags = f"--data-path {corpus}"
    run = jobs.odyssey(
        name, flags, ranks=4, stages=2, inject="rank=3,step=2,at=backward;rank=0,step=3,at=evaluate"
    )
    plain = jobs.plain(flags, ranks=4, stages=2)
    assert_same_lines(run, plain)
    assert run.killed == [0, 3]
    assert plain.iterations[-1].loss != jobs.plain(ranks=4, stages=2).iterations[-1].loss, (
        "the data did not matter"
    )


def test_float64_to_the_last_digits(jobs, name):
    """Losses of all iterations, and what the checkpoint at the end holds: weights and optimizer state."""
    saved = {one: jobs.folder / f"{name}-{one}" for one in ("shot", "undisturbed")}
    flags = {
        one: f"{MOCK} --odyssey-float64 on --save {folder} --save-interval 6" for one, folder in saved.items()
    }
    undisturbed = jobs.odyssey(f"{name}-reference", flags["undisturbed"], ranks=6, stages=2)
    shot = jobs.odyssey(
        name, flags["shot"], ranks=6, stages=2,
        inject="rank=5,step=1,at=backward;rank=0,step=3,at=reduce;rank=3,step=5,at=agreement",
    )  # fmt: skip
    assert undisturbed.exit_code == shot.exit_code == 0, shot.log[-3000:]
    assert shot.killed == [0, 3, 5]
    assert len(undisturbed.run.steps) == 6
    assert_equal_numbers(shot.run.steps, undisturbed.run.steps, rel=FLOAT64)
    assert_equal_checkpoints(saved["shot"], saved["undisturbed"], 6)
