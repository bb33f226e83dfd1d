"""A run with failures equals a run without (I1-I6): losses, weights, samples, to 1e-10 in float64."""

from __future__ import annotations

import itertools

import pytest

from odyssey_megatron.recover import Phase
from tests.e2e.jobs import (
    BFLOAT16,
    LONG,
    ROUNDING,
    TOLERANCE,
    assert_equal_numbers,
    assert_equal_runs,
    assert_equal_weights,
    assert_holders_agree,
    cases_of,
    run_case,
)

# Ranks are placed stage by stage: with PP4 x DP2, ranks 0 and 1 hold the first stage, 6 and 7 the last.
PP4_DP2, PP2_DP4, PP2_DP3, PP4 = (8, 4), (8, 2), (6, 2), (4, 4)

CASES = {
    # every point of a step, on the first, a middle or the last stage, or on rank 0 (all of it: test_matrix.py)
    "forward-first": (PP4_DP2, "auto", "rank=1,step=2,at=forward"),
    "backward-last": (PP4_DP2, "replan", "rank=6,step=2,at=backward,microbatch=4"),
    "reduce-rank0": (PP4_DP2, "replan", "rank=0,step=2,at=reduce"),
    "agreement-middle": (PP4_DP2, "auto", "rank=3,step=2,at=agreement"),
    "optimizer-middle": (PP4_DP2, "replan", "rank=4,step=2,at=optimizer"),
    "commit-last": (PP4_DP2, "auto", "rank=7,step=2,at=commit"),
    "first-step": (PP4_DP2, "replan", "rank=4,step=0,at=weight_grad"),
    "last-step": (PP4_DP2, "auto", "rank=0,step=5,at=optimizer"),
    "hang": (PP4_DP2, "auto", "rank=5,step=2,at=backward,signal=STOP"),
    # several
    "two-at-once": (PP2_DP4, "auto", "rank=1,step=2,at=forward;rank=6,step=2,at=forward"),
    "two-at-once-same-stage": (PP2_DP4, "reroute", "rank=0,step=2,at=reduce;rank=2,step=2,at=reduce"),
    "in-a-row-reroute": (
        PP2_DP4, "reroute",
        "rank=0,step=1,at=backward;rank=5,step=2,at=optimizer;rank=2,step=4,at=reduce",
    ),
    "in-a-row-replan": (
        PP2_DP4, "replan",
        "rank=7,step=1,at=forward;rank=0,step=2,at=reduce;rank=3,step=4,at=agreement",
    ),
    "in-a-row-auto": (PP2_DP3, "auto", "rank=0,step=1,at=reduce;rank=4,step=3,at=optimizer"),
    "same-step-again": (PP2_DP3, "replan", "rank=5,step=2,at=backward;rank=1,step=2,at=forward,generation=2"),
    # During the recovery itself; whoever dies then may still be in the step before.
    "in-abort": (PP4_DP2, "auto", "rank=3,step=2,at=forward;rank=4,step=-1,at=abort,generation=1"),
    "in-groups": (PP2_DP4, "reroute", "rank=3,step=2,at=forward;rank=4,step=-1,at=groups,generation=2"),
    "in-agree": (PP4_DP2, "auto", "rank=6,step=2,at=reduce;rank=1,step=-1,at=agree,generation=2"),
    "in-transfer": (PP4_DP2, "replan", "rank=6,step=2,at=forward;rank=1,step=-1,at=transfer,generation=2"),
    "down-to-one-pipeline": (
        PP2_DP3, "replan",
        "rank=0,step=1,at=forward;rank=1,step=2,at=backward;rank=3,step=3,at=reduce",
    ),
}  # fmt: skip

ALWAYS = {"forward-first", "reduce-rank0", "hang", "same-step-again", "in-transfer", "down-to-one-pipeline"}
"""In every run of the tests; the others by the marker, and some of them in each run of CI."""

SHARDED = {
    "backward": (PP2_DP4, "reroute", "rank=1,step=2,at=backward"),
    "optimizer": (PP2_DP4, "auto", "rank=4,step=2,at=optimizer"),
    "between-step-and-gather": (PP2_DP4, "replan", "rank=0,step=2,at=commit"),
    "gather": (PP2_DP4, "auto", "rank=5,step=2,at=param_gather"),
    "two-at-once": (PP2_DP4, "auto", "rank=1,step=2,at=param_gather;rank=6,step=2,at=param_gather"),
    "while-weights-arrive": (PP2_DP4, "auto", "rank=0,step=2,at=forward;rank=6,step=3,at=forward"),
    "in-a-row": (
        PP2_DP4, "auto",
        "rank=0,step=1,at=param_gather;rank=5,step=2,at=optimizer;rank=2,step=4,at=commit",
    ),
    "while-gathering-again": (  # behind "replan" a layer may have two holders, who keep all of it and gather nothing
        PP2_DP4, "reroute",
        "rank=3,step=2,at=commit;rank=7,step=2,at=param_gather,generation=2",
    ),
}  # fmt: skip
"""With the optimizer state of each layer cut over its four holders, each slice on two of them."""


@pytest.mark.parametrize("case", cases_of(SHARDED, {"gather", "while-gathering-again"}))
def test_no_rank_takes_optimizer_state_with_it(jobs, undisturbed, name, case):
    shot = run_case(jobs, name, SHARDED[case], "--use-distributed-optimizer", undisturbed())
    first = shot.named("decision")[0]["layout"]
    assert first["copies"] == 2
    assert [sorted(ring) for ring in first["keepers"]] == first["holders"]


@pytest.mark.matrix  # of the default run is the same in tests/launch/test_survival.py, without a model
def test_a_rank_whose_training_thread_is_stuck(jobs, undisturbed, name):
    """Its process beats all the same, hears of generations, and enters none."""
    inject = "rank=5,step=2,at=backward,signal=STUCK"
    limits = "--odyssey-op-timeout-s 6 --odyssey-build-timeout-s 2 --odyssey-recovery-timeout-s 6"
    shot = jobs.run(name, ranks=8, stages=4, flags=f"{limits} --odyssey-inject {inject}")
    assert_equal_runs(shot, undisturbed(), kills=1)
    assert [event["cause"] for event in shot.named("failure_detected")] == ["hang"]


@pytest.mark.matrix
def test_momentum_moves_with_its_layer(jobs, undisturbed, name):
    """Two layouts change: before the first step has given a momentum its first value, and behind others."""
    flags = "--optimizer sgd --lr 0.3"
    inject = "rank=7,step=0,at=backward;rank=0,step=3,at=optimizer"
    shot = jobs.run(
        name, ranks=8, stages=4, flags=f"{flags} --odyssey-policy replan --odyssey-inject {inject}"
    )
    assert_equal_runs(shot, undisturbed(flags), kills=2)
    layouts = [event["layout"]["holders"] for event in shot.named("decision")]
    assert all(
        any(set(now) - set(then) for now, then in zip(after, before, strict=True))
        for before, after in itertools.pairwise(layouts)
    ), "no layer moved"
    others = [undisturbed(other).run.steps[-1].loss for other in (f"{flags} --sgd-momentum 0", "")]
    assert shot.run.steps[-1].loss != pytest.approx(others[0], rel=1e-3)
    assert shot.run.steps[-1].loss != pytest.approx(others[1], rel=1e-3)


@pytest.mark.matrix
def test_in_16_bits_holders_are_equal_after_every_step(jobs, undisturbed, name):
    flags = f"--use-distributed-optimizer {BFLOAT16}"
    run_case(jobs, name, SHARDED["in-a-row"], flags, undisturbed(BFLOAT16), alike=True)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "inject"),
    [
        ("--train-iters 32", "rank=3,step=2,at=agreement;rank=1,step=4,at=commit;rank=0,step=30,at=reduce"),
        (
            f"{LONG} --odyssey-respawn 1",
            "rank=3,step=2,at=agreement;rank=1,step=4,at=commit;rank=0,step=50,at=backward",
        ),
    ],
)
def test_a_step_that_overflows_is_skipped_everywhere(jobs, undisturbed, name, flags, inject):
    """Ranks die in steps that are skipped, at the agreement on that and behind it, and in one that counts. Those that
    come back must know what the scale has become, and how many steps were skipped.
    """
    half = f"--fp16 --odyssey-float64 off {flags.partition(' --odyssey')[0]}"
    shot = jobs.run(name, ranks=6, stages=2, flags=f"{half} {flags} --odyssey-inject {inject}")
    assert shot.exit_code == 0, shot.log[-4000:]
    assert len(shot.named("injected")) == 3
    assert bool(shot.named("rank_joined")) is ("respawn" in flags)
    ours, theirs = (
        {event["step"]: event for event in one.named("step_committed")} for one in (shot, undisturbed(half))
    )
    assert [ours[step]["lr"] for step in theirs] == [one["lr"] for one in theirs.values()]
    skipped = [step for step, one in theirs.items() if one["skipped"]]
    # From step 21 on the scale fits, where it does not it is halved again: by step 28, hanging on roundings.
    assert {0, 2, 4} < set(skipped) < set(theirs) - {30, 50}
    for step, one in theirs.items():
        assert ours[step]["loss"] == pytest.approx(one["loss"], rel=ROUNDING), step
        if one["skipped"]:
            assert ours[step]["grad_norm"] is one["grad_norm"] is None
        else:
            assert ours[step]["grad_norm"] == pytest.approx(one["grad_norm"], rel=ROUNDING), step
    assert_holders_agree(shot)


@pytest.mark.matrix
def test_with_three_copies_of_optimizer_state_two_may_be_lost_at_once(jobs, undisturbed, name):
    """Of neighbours both copies of a slice would be gone if there were two."""
    inject = "rank=0,step=2,at=commit;rank=1,step=2,at=commit"
    flags = f"--use-distributed-optimizer --odyssey-redundancy-level 2 --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=8, stages=2, flags=flags)
    assert_equal_runs(shot, undisturbed(), kills=2)
    keepers = shot.named("decision")[0]["layout"]["keepers"]
    assert any(1 in (ring[ring.index(0) - 1], ring[(ring.index(0) + 1) % 4]) for ring in keepers if 0 in ring)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "inject"),
    [
        (
            "--use-distributed-optimizer --odyssey-policy replan",
            "rank=0,step=1,at=optimizer;rank=5,step=3,at=param_gather",
        ),
        (
            "--odyssey-redundancy state --odyssey-policy reroute",
            "rank=3,step=1,at=optimizer;rank=4,step=3,at=backward",
        ),
    ],
)
def test_spare_state_in_host_memory_is_as_good(jobs, undisturbed, name, flags, inject):
    """The second keepers' and the shadows', which are all that is left of some layers' after the kills."""
    ranks, stages = PP2_DP4 if "distributed" in flags else (5, 5)
    flags = f"{flags} --odyssey-spare-state host --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=ranks, stages=stages, flags=flags)
    assert_equal_runs(shot, undisturbed(), kills=inject.count("rank="))
    assert any(event["host_bytes"] for event in shot.named("weights"))


ALONE = {
    "forward": (PP4, "reroute", "rank=2,step=2,at=forward,microbatch=3"),
    "rank0": (PP4, "replan", "rank=0,step=2,at=backward"),
    "reduce": (PP4, "auto", "rank=3,step=2,at=reduce"),
    "optimizer": (PP4, "reroute", "rank=1,step=2,at=optimizer"),
    "in-a-row": (PP4, "replan", "rank=3,step=1,at=agreement;rank=0,step=4,at=forward"),
}
"""One pipeline, each of its layers with a shadow."""


@pytest.mark.parametrize("case", cases_of(ALONE, {"in-a-row"}))
def test_a_shadow_takes_over_without_data_parallelism(jobs, undisturbed, name, case):
    shot = run_case(jobs, name, ALONE[case], "--odyssey-redundancy state", undisturbed())
    if "reroute" in ALONE[case]:
        assert shot.named("decision")[1]["policy"] == "takeover"


@pytest.mark.parametrize("case", cases_of(CASES, ALWAYS))
def test_a_run_with_failures_equals_one_without(jobs, undisturbed, name, case):
    run_case(jobs, name, CASES[case], "", undisturbed())


def test_a_job_may_start_with_the_best_layout(jobs, undisturbed, name):
    """Its pipelines are not those of the launch line; its numbers are."""
    longer = "--seq-length 64"
    flags = "--odyssey-layout auto --odyssey-inject rank=0,step=2,at=backward;rank=6,step=4,at=optimizer"
    shot = jobs.run(name, ranks=8, stages=4, flags=f"{longer} {flags}")
    assert_equal_runs(shot, undisturbed(longer), kills=2)
    rows = {row["name"]: row for row in shot.named("decision")[0]["candidates"]}
    assert rows["layout"]["chosen"]
    assert rows["layout"]["step_s"] < rows["launch line"]["step_s"]


def test_the_layout_does_not_matter(undisturbed):
    """DP2, PP4 x DP2 and PP2 x DP3 train the same model on the same samples."""
    runs = [undisturbed()]
    runs += [undisturbed(ranks=ranks, stages=stages) for ranks, stages in (PP4_DP2, PP2_DP3)]
    for outcome in runs[1:]:
        assert_equal_numbers(outcome.run.steps, runs[0].run.steps, rel=TOLERANCE)
        assert_equal_weights(outcome.weights(), runs[0].weights())


@pytest.mark.matrix
def test_dropout_follows_the_microbatch_and_not_the_rank(jobs, undisturbed, name):
    """I2: a rerouted microbatch draws the numbers that it would have drawn at home."""
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1"
    shot = jobs.run(
        name, ranks=6, stages=2,
        flags=f"{dropout} --odyssey-policy reroute --odyssey-inject rank=1,step=2,at=backward",
    )  # fmt: skip
    assert_equal_runs(shot, undisturbed(dropout), kills=1)
    plain = undisturbed().run.steps[-1].loss
    assert plain != pytest.approx(shot.run.steps[-1].loss, rel=1e-6), "dropout did nothing"


def test_every_phase_of_a_recovery_is_shot_at():
    assert {f"in-{phase.value}" for phase in Phase if phase is not Phase.TRAIN} <= set(CASES)
