"""Ranks that come back: started again, filled behind a step, routed to between two steps. The losses stay the same."""

from __future__ import annotations

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.errors import EXIT_LAYERS_LOST
from odyssey_megatron.policy.costs.profile import load_profile
from tests.e2e.jobs import LONG, assert_equal_runs
from tests.policy.test_rejoin import least_memory

ONCE, TWICE = "--odyssey-respawn 1", "--odyssey-respawn 2"


def members(outcome) -> list[int]:
    """How many ranks each generation began with, in the order of generations."""
    begun = {e["generation"]: len(e["members"]) for e in outcome.named("generation_started")}
    return [begun[generation] for generation in sorted(begun)]


def plans(outcome) -> list[str]:
    """The hashes of the plans carried out, in order."""
    begun = {e["generation"]: e["plan_hash"] for e in outcome.named("generation_started")}
    return [begun[generation] for generation in sorted(begun)]


@pytest.mark.parametrize(
    ("policy", "inject"),
    [
        pytest.param("replan", "rank=0,step=2,at=forward", marks=pytest.mark.matrix),
        pytest.param("reroute", "rank=5,step=2,at=backward", marks=pytest.mark.matrix),
        pytest.param("auto", "rank=7,step=2,at=optimizer", marks=pytest.mark.matrix),
        pytest.param("auto", "rank=3,step=2,at=backward,signal=STOP", marks=pytest.mark.matrix),
        pytest.param("replan", "rank=2,step=2,at=reduce;rank=5,step=2,at=reduce", marks=pytest.mark.matrix),
    ],
)
def test_back_to_the_first_plan(jobs, reference, name, policy, inject):
    shot = jobs.run(
        name, ranks=8, stages=4, flags=f"{LONG} {ONCE} --odyssey-policy {policy} --odyssey-inject {inject}"
    )
    assert_equal_runs(shot, reference, kills=inject.count("rank="))
    assert len(shot.named("rank_joined")) == inject.count("rank=")
    assert members(shot)[0] == members(shot)[-1] == 8
    assert plans(shot)[0] == plans(shot)[-1], "back to the full layout gives exactly the first plan"


@pytest.mark.parametrize(
    ("policy", "inject"),
    [
        pytest.param("replan", "rank=0,step=2,at=param_gather", marks=pytest.mark.matrix),
        pytest.param("reroute", "rank=5,step=2,at=backward", marks=pytest.mark.matrix),
        pytest.param("auto", "rank=7,step=2,at=optimizer", marks=pytest.mark.matrix),
        pytest.param("auto", "rank=3,step=2,at=commit,signal=STOP", marks=pytest.mark.matrix),
        pytest.param("auto", "rank=2,step=2,at=reduce;rank=5,step=2,at=reduce", marks=pytest.mark.matrix),
        pytest.param(
            "replan", "rank=1,step=2,at=commit;rank=6,step=4,at=param_gather", marks=pytest.mark.matrix
        ),
        pytest.param(
            "reroute",
            "rank=5,step=2,at=commit;rank=5,step=-1,at=agreement,incarnation=1",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "reroute",
            "rank=5,step=2,at=commit;rank=2,step=-1,at=forward,generation=3",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "reroute",
            "rank=5,step=2,at=commit;rank=6,step=-1,at=optimizer,generation=3",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "replan",
            "rank=5,step=2,at=commit;rank=0,step=-1,at=param_gather,generation=4",
            marks=pytest.mark.matrix,
        ),
    ],
)
@pytest.mark.parametrize("spare", ["device", pytest.param("host", marks=pytest.mark.matrix)])
def test_with_a_distributed_optimizer_its_states_go_back_too(jobs, reference, name, policy, inject, spare):
    flags = (
        f"{LONG} {TWICE} --use-distributed-optimizer --odyssey-spare-state {spare} --odyssey-policy {policy}"
    )
    shot = jobs.run(name, ranks=8, stages=2, flags=f"{flags} --odyssey-inject {inject}")
    assert_equal_runs(shot, reference, kills=inject.count("rank="))
    assert members(shot)[0] == members(shot)[-1] == 8
    decided = shot.named("decision")
    for what in ("layout", "schedule"):  # slices move behind the first step of the last plan
        assert decided[0][what] == decided[-1][what]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "inject",
    [
        "",
        "rank=1,step=-1,at=transfer,incarnation=1",
        "rank=1,step=-1,at=param_gather,incarnation=1",
        # Behind the first agreement: before it the one pipeline's ranks may still be alone with their layers.
        "rank=0,step=-1,at=optimizer,generation=3",
        "rank=4,step=-1,at=commit,generation=3",
    ],
)
def test_without_memory_for_both_layouts_it_goes_there_at_once(
    jobs, undisturbed, reference, name, inject, tmp_path
):
    spec = JobSpec(
        num_layers=8, pipeline_model_parallel_size=2, tensor_model_parallel_size=1, num_microbatches=12,
        tokens_per_step=12 * 16, train_steps=60, optimizer_copies=2,
    )  # fmt: skip
    profile = load_profile(undisturbed(ranks=8, stages=4).run_dir / "profile.json")
    least_memory(spec, profile, (1,), "replan").save(tmp_path / "little_memory.json")
    flags = (
        f"{LONG} {TWICE} --use-distributed-optimizer --odyssey-policy replan "
        f"--odyssey-profile {tmp_path / 'little_memory.json'} --odyssey-inject rank=1,step=2,at=commit;{inject}"
    )
    shot = jobs.run(name, ranks=8, stages=2, flags=flags)
    assert_equal_runs(shot, reference, kills=2 if inject else 1)
    decided = shot.named("decision")
    assert [event["policy"] for event in decided[:3]] == ["initial", "replan", "initial"]
    before, back = (event["layout"]["keepers"] for event in decided[1:3])
    assert any(set(keepers) > set(had) for had, keepers in zip(before, back, strict=True))
    for what in ("layout", "schedule"):
        assert decided[0][what] == decided[-1][what]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "inject",
    [
        # the new process dies in turn, and a third one takes its place
        "rank=5,step=-1,at=reduce,incarnation=1",
        "rank=5,step=0,at=groups,incarnation=1",
        "rank=5,step=-1,at=transfer,incarnation=1",
        "rank=5,step=-1,at=agreement,incarnation=1",
        "rank=5,step=-1,at=commit,incarnation=1",
        # somebody else dies while it is filled, or when it has just been routed to
        "rank=2,step=-1,at=forward,generation=3",
        "rank=2,step=-1,at=groups,generation=3",
        "rank=6,step=-1,at=agreement,generation=3",
        "rank=7,step=-1,at=commit,generation=3",
        "rank=0,step=-1,at=groups,generation=4",
        "rank=1,step=-1,at=backward,generation=4",
        "rank=4,step=-1,at=optimizer,generation=4",
    ],
)
def test_killed_while_it_joins(jobs, reference, name, inject):
    flags = f"{LONG} {TWICE} --odyssey-policy reroute --odyssey-inject rank=5,step=2,at=backward;{inject}"
    shot = jobs.run(name, ranks=8, stages=4, flags=flags)
    assert_equal_runs(shot, reference, kills=2)
    assert members(shot)[-1] == 8, members(shot)
    assert plans(shot)[0] == plans(shot)[-1]


def test_a_rank_about_to_join_leaves_with_the_others(jobs, name):
    """The last holder of some layers dies just before it would have sent them."""
    inject = "rank=5,step=2,at=forward;rank=4,step=-1,at=groups,generation=3"
    flags = f"{LONG} {ONCE} --odyssey-policy reroute --odyssey-inject {inject}"
    outcome = jobs.run(name, ranks=8, stages=4, flags=flags)
    assert outcome.exit_code == EXIT_LAYERS_LOST, outcome.log[-3000:]
    assert [event["target"] for event in outcome.named("rank_joined")] == [5]
    assert [event["rank"] for event in outcome.named("stopped")].count(5) == 1
    assert "Traceback" not in outcome.log
