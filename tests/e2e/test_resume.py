"""An interrupted step goes on where it was: the survivors keep what they have done, and the run stays exact (I6)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.policy.costs.profile import Profile
from tests.e2e.jobs import assert_equal_runs, cases_of
from tests.plan.samples import layer, uniform_costs

BATCH = "--global-batch-size 24"

REROUTED = {
    f"{point}-{stage}": f"rank={rank},step=2,at={point},microbatch={microbatch}"
    for point in ("forward", "backward", "weight_grad")
    for stage, rank, microbatch in (("first", 1, 9), ("middle", 4, 4), ("last", 7, 3))
} | {
    "rank0": "rank=0,step=2,at=backward,microbatch=4",
    "two-at-once": "rank=1,step=2,at=forward,microbatch=9;rank=6,step=2,at=backward,microbatch=4",
    "again-in-the-same-step": "rank=3,step=2,at=backward,microbatch=3;rank=7,step=2,at=forward,generation=2",
    "in-a-row": "rank=1,step=1,at=weight_grad,microbatch=3;rank=6,step=3,at=forward,microbatch=6",
}  # fmt: skip
"""PP4 x DP2: ranks 0 and 1 hold the first stage, which runs its first four forwards whether or not others have begun.
Rank 7 follows rank 3 and so has forwards left, however late that death is noticed; rank 6 may be through by then.
"""

TAKEN_OVER = {
    f"{point}-{rank}": f"rank={rank},step=2,at={point},microbatch=9"
    for point in ("forward", "backward", "weight_grad")
    for rank in range(4)
}
"""One pipeline of four stages with shadows, some of them neighbours."""

ALWAYS = {"again-in-the-same-step", "weight_grad-2"}


def check(shot, reference, inject):
    assert_equal_runs(shot, reference, kills=inject.count("rank="))
    assert {one.outcome for one in shot.run.recoveries} - {"superseded"} == {"resume"}


@pytest.mark.parametrize("case", cases_of(REROUTED, ALWAYS))
def test_rerouted_in_mid_step(jobs, undisturbed, name, case):
    flags = f"{BATCH} --odyssey-policy reroute --odyssey-inject {REROUTED[case]}"
    check(jobs.run(name, ranks=8, stages=4, flags=flags), undisturbed(BATCH), REROUTED[case])


@pytest.mark.parametrize("case", cases_of(TAKEN_OVER, ALWAYS))
def test_taken_over_in_mid_step(jobs, undisturbed, name, case):
    flags = f"{BATCH} --odyssey-redundancy state --odyssey-policy reroute --odyssey-inject {TAKEN_OVER[case]}"
    check(jobs.run(name, ranks=4, stages=4, flags=flags), undisturbed(BATCH), TAKEN_OVER[case])


DONE_AGAIN = {
    "rerouted": (8, 4, "", "reroute", REROUTED["backward-middle"]),
    "two-at-once": (8, 4, "", "reroute", REROUTED["two-at-once"]),
    "again-in-the-same-step": (
        8, 4, "", "reroute",
        "rank=3,step=2,at=backward,microbatch=3;rank=6,step=2,at=backward,generation=2",
    ),
    "taken-over": (4, 4, "--odyssey-redundancy state", "reroute", TAKEN_OVER["weight_grad-2"]),
    "shared-optimizer": (
        8, 2, "--use-distributed-optimizer", "replan",
        "rank=1,step=2,at=weight_grad,microbatch=5",
    ),
}  # fmt: skip
"""Some of these would go on if they were let."""


@pytest.mark.matrix
@pytest.mark.parametrize("case", DONE_AGAIN)
def test_a_step_is_done_again_where_that_is_asked_for(jobs, undisturbed, name, case):
    ranks, stages, more, policy, inject = DONE_AGAIN[case]
    flags = (
        f"{BATCH} {more} --odyssey-interrupted-step redo --odyssey-policy {policy} --odyssey-inject {inject}"
    )
    shot = jobs.run(name, ranks=ranks, stages=stages, flags=flags)
    assert_equal_runs(shot, undisturbed(BATCH), kills=inject.count("rank="))
    assert {one.outcome for one in shot.run.recoveries} - {"superseded"} == {"redo"}


def test_where_nobody_has_begun_nothing_is_done_again(jobs, undisturbed, name):
    inject = "rank=0,step=2,at=forward,microbatch=0"
    flags = f"{BATCH} --odyssey-redundancy state --odyssey-policy reroute --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=4, stages=4, flags=flags)
    assert_equal_runs(shot, undisturbed(BATCH), kills=1)
    (recovery,) = shot.run.recoveries
    # "finish": somebody was still behind in the step before.
    assert recovery.outcome in ("resume", "finish")


DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
RUN_AHEAD = {
    "forward": (4, 4, "", "rank=1,step=2,at=forward,microbatch=9"),
    "backward": (4, 4, DROPOUT, "rank=0,step=2,at=backward,microbatch=9"),
    "weight_grad": (4, 4, "", "rank=2,step=2,at=weight_grad,microbatch=9"),
    "head": (4, 4, DROPOUT, "rank=3,step=2,at=backward,microbatch=20"),
    "again-in-the-same-step": (
        4, 4, "",
        "rank=2,step=2,at=backward,microbatch=9;rank=0,step=2,at=backward,generation=2",
    ),
    "two-pipelines": (4, 2, "", "rank=1,step=2,at=backward,microbatch=7"),
    "shared-optimizer": (4, 2, "--use-distributed-optimizer", "rank=0,step=2,at=weight_grad,microbatch=6"),
}  # fmt: skip
"""With --odyssey-redundancy compute: each loses a stage that somebody has run ahead of."""


@pytest.mark.matrix
@pytest.mark.parametrize("case", RUN_AHEAD)
def test_what_was_run_ahead_is_not_done_again(jobs, undisturbed, name, case):
    ranks, stages, more, inject = RUN_AHEAD[case]
    flags = f"{BATCH} {more} --odyssey-redundancy compute --odyssey-policy reroute --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=ranks, stages=stages, flags=flags)
    check(shot, undisturbed(f"{BATCH} {DROPOUT}" if more == DROPOUT else BATCH), inject)
    assert shot.run.recoveries[0].eager_forwards > 0


@pytest.mark.parametrize("room", [16, 60])
def test_without_room_for_messages_a_step_is_done_again(jobs, undisturbed, tmp_path, name, room):
    """A stage's layers take 8 units and a microbatch of them 2; 12 microbatches have as many messages each way."""
    unit = 2**20
    one = replace(
        layer(1e-3, 1e-3, 1e-3, unit), weight_bytes=unit, gradient_bytes=unit, optimizer_bytes=2 * unit
    )
    costs = uniform_costs(6, ends=True)
    layers = (costs.layers[0], *(one,) * 6, costs.layers[-1])
    costs = replace(costs, layers=layers, message_bytes=unit, link_bytes_per_s=1e12, memory_bytes=room * unit)
    profile = tmp_path / "tight.json"
    Profile(costs=costs, group_build_s=0.0).save(profile)
    inject = "rank=1,step=2,at=weight_grad;rank=4,step=4,at=backward"
    flags = f"{BATCH} --odyssey-profile {profile} --odyssey-policy reroute --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=6, stages=3, flags=flags)
    assert_equal_runs(shot, undisturbed(BATCH), kills=2)
    outcomes = {one.outcome for one in shot.run.recoveries} - {"superseded"}
    assert outcomes == ({"redo"} if room == 16 else {"resume"})
    assert ("messages are not kept" in shot.log) == (room == 16)
