"""How a job ends when it cannot go on, or should not begin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odyssey_megatron.errors import EXIT_BAD_INPUT, EXIT_LAYERS_LOST, EXIT_UNSOUND
from tests.e2e import export_cut_short, unequal
from tests.e2e.jobs import assert_equal_weights


def test_losing_the_last_holder_stops_the_job(jobs, name):
    """I9: both holders of the first stage die; what was committed stands, nothing is trained on.

    Where one of them is so much later that the others have recovered without the first, rerouting has moved no layer.
    """
    inject = "rank=0,step=2,at=forward;rank=1,step=2,at=forward"
    flags = f"--odyssey-policy reroute --odyssey-inject {inject}"
    outcome = jobs.run(name, ranks=8, stages=4, flags=flags)
    assert outcome.exit_code == EXIT_LAYERS_LOST, outcome.log[-3000:]
    assert [step.step for step in outcome.run.steps] == [0, 1]
    assert re.search(
        r"no holder is left of the embedding and layer 1: rank\(s\) \[(0|1|0, 1)\] had it", outcome.log
    )
    assert outcome.named("job_finished")[-1]["exit_code"] == EXIT_LAYERS_LOST


def test_losing_the_last_holder_while_another_is_filled_stops_the_job(jobs, name):
    """Who is alive by then has nothing yet: it neither goes on nor has it finished."""
    inject = "rank=1,step=1,at=backward;rank=0,step=-1,at=reduce,generation=3"
    flags = f"--train-iters 400 --odyssey-respawn 1 --odyssey-inject {inject}"
    outcome = jobs.run(name, ranks=2, stages=1, flags=flags)
    assert outcome.exit_code == EXIT_LAYERS_LOST, outcome.log[-3000:]
    assert "no holder is left of the embedding, layers 1 to 6 and the head: rank(s) [0] had it" in outcome.log
    assert "Traceback" not in outcome.log


def test_faults_that_did_not_strike_are_named(jobs, name):
    """No process comes in the place of rank 1, which dies, and the example has no evaluation."""
    left = "rank=1,step=2,at=backward,incarnation=1; rank=0,step=3,at=evaluate"
    inject = f"rank=1,step=2,at=backward;{left.replace(' ', '')}"
    outcome = jobs.run(name, ranks=2, stages=1, flags=f"--odyssey-inject {inject}")
    assert outcome.exit_code == 0, outcome.log[-3000:]
    told = f"no record that 2 fault(s) struck, so this job does not show that it survives them: {left}\n"
    assert outcome.log.count(told) == 1, outcome.log[-3000:]
    assert list(outcome.run.not_struck) == left.split("; ")


def test_final_weights_are_written_by_those_who_are_left(jobs, name, undisturbed):
    outcome = jobs.run(name, ranks=4, stages=2, script=Path(export_cut_short.__file__))
    assert outcome.exit_code == 0, outcome.log[-3000:]
    assert_equal_weights(outcome.weights(), undisturbed().weights())
    assert not list((outcome.run_dir / "weights").glob("*.unfinished"))


def test_final_weights_that_nobody_can_write_are_no_success(jobs, name):
    """The only holder of the first layers dies while it writes them."""
    flags = "--odyssey-redundancy off"
    outcome = jobs.run(name, ranks=4, stages=4, flags=flags, script=Path(export_cut_short.__file__))
    assert outcome.exit_code == EXIT_LAYERS_LOST, outcome.log[-3000:]
    assert "no holder is left of" in outcome.log
    assert not (outcome.run_dir / "weights" / "layer_000.pt").exists()


def test_a_script_that_is_cut_short_after_training_is_no_success(jobs, name):
    outcome = jobs.run(name, ranks=2, stages=1, flags="--late", script=Path(export_cut_short.__file__))
    assert outcome.exit_code == 1, outcome.log[-3000:]
    assert "rank(s) [0] were killed behind the job's last step" in outcome.log


def test_numbers_that_are_not_finite_stop_the_job(jobs, name):
    outcome = jobs.run(name, ranks=4, stages=2, flags="--lr 1e200 --min-lr 1e200")
    check_unsound(outcome, "the gradient norm is nan. No weight was changed.", steps=2)


def test_who_has_no_room_for_what_is_sent_says_so(jobs, name):
    """Once a failure moves layers: one message of all ranks, and no failure of hardware is looked for."""
    flags = "--optimizer sgd --odyssey-policy replan --odyssey-inject rank=7,step=2,at=backward --odyssey-hang-s 20"
    outcome = jobs.run(name, ranks=8, stages=4, flags=flags, script=Path(unequal.__file__))
    check_unsound(outcome, "nothing was sent. rank ", steps=2)
    assert "weight.momentum_buffer float64 [" in outcome.log
    assert len(outcome.named("decision")) == 2


def check_unsound(outcome, message, *, steps):
    assert outcome.exit_code == EXIT_UNSOUND, outcome.log[-3000:]
    assert outcome.log.count(message) == 1, outcome.log[-3000:]
    assert "Traceback" not in outcome.log
    assert [step.step for step in outcome.run.steps] == list(range(steps))


@pytest.mark.parametrize(
    ("ranks", "stages", "flags", "message"),
    [
        (8, 8, "", "--pipeline-model-parallel-size 8 exceeds --num-layers 6"),
        (6, 4, "", "the world size (6 ranks) is not divisible by --pipeline-model-parallel-size 4"),
        (
            2,
            1,
            "--odyssey-policy best",
            "--odyssey-policy 'best' is unknown; use one of auto, reroute, replan",
        ),
        (2, 1, "--odyssey-inject rank=2,step=1,at=forward", "names rank 2, but the job has ranks 0 to 1"),
        (2, 1, "--odyssey-inject rank=1,step=1,at=lunch", "at=lunch is unknown"),
        (2, 1, "--data-path nowhere/text", "there is no file nowhere/text.bin"),
        (2, 1, "--micro-batch-size 5", "--global-batch-size 12 is not divisible by --micro-batch-size 5"),
        (
            2,
            1,
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 15",
            "--seq-length 15 is not divisible by 2, as --tensor-model-parallel-size 2 with --sequence-parallel cut it",
        ),
        (2, 1, "--num-query-groups 3", "--num-attention-heads 4 is not divisible by --num-query-groups 3"),
        (2, 1, "--lr-warmup-iters 6", "Megatron refuses this learning rate schedule"),
        (
            2,
            1,
            "--sequence-parallel",
            "Megatron refuses this model: Cannot use sequence parallelism without tensor",
        ),
        (
            2,
            1,
            "--train-iters 0",
            "TrainingJob has train_iters 0, and a whole number of 1 or more is expected",
        ),
        (2, 1, "--odyssey-polcy auto", "unknown flag --odyssey-polcy"),
        (2, 1, "--odyssey-inject rank=1,step=99,at=forward", "the job has 6 step(s), which count from 0"),
        (2, 1, "--odyssey-inject rank=1,step=3,at=exchange", "Add --odyssey-time-links on"),
        (2, 1, "--odyssey-inject rank=1,step=2,at=param_gather", "Add --use-distributed-optimizer"),
    ],
)
def test_bad_input_is_refused_in_one_paragraph(jobs, name, ranks, stages, flags, message):
    outcome = jobs.run(name, ranks=ranks, stages=stages, flags=flags)
    assert outcome.exit_code == EXIT_BAD_INPUT, outcome.log[-3000:]
    assert outcome.log.count(message) == 1, outcome.log[-3000:]
    assert "Traceback" not in outcome.log
    assert not outcome.run_dir.exists() or not outcome.named("step_committed")
