"""Two-speed recovery: the job goes on at once by routes, and layers move behind the next steps."""

from __future__ import annotations

import json

import pytest

from odyssey_megatron.plan.placing.slices import NOBODY
from tests.e2e.jobs import PAIRS, assert_equal_runs
from tests.e2e.test_shrinking import CONTEXT, GANG

pytestmark = pytest.mark.matrix

STEPS = "--train-iters 20"


def slow_links(measured, path):
    """The profile of a job with links so slow that it pays to change plans twice rather than to wait once. A job
    believes it until it has measured its own, in its second step.
    """
    known = json.loads((measured.run_dir / "profile.json").read_text())
    known["costs"]["link_bytes_per_s"] = 1e5
    path.write_text(json.dumps(known))
    return path


@pytest.fixture
def profile(undisturbed, tmp_path):
    return slow_links(undisturbed(ranks=8, stages=4), tmp_path / "slow_links.json")


@pytest.mark.parametrize(
    "inject",
    [
        "",
        # another failure while layers move, and when they have just been taken into use
        "rank=2,step=-1,at=forward,generation=3",
        "rank=1,step=-1,at=groups,generation=3",
        "rank=7,step=-1,at=agree,generation=3",
        "rank=6,step=-1,at=transfer,generation=3",
        "rank=6,step=-1,at=agreement,generation=3",
        "rank=0,step=-1,at=commit,generation=3",
        "rank=3,step=-1,at=agree,generation=4",
        "rank=0,step=-1,at=backward,generation=4",
    ],
)
def test_routes_first_and_layers_behind_the_steps(jobs, undisturbed, profile, name, inject):
    flags = f"{STEPS} --odyssey-profile {profile} --odyssey-inject rank=5,step=0,at=backward;{inject}"
    shot = jobs.run(name, ranks=8, stages=4, flags=flags)
    if "transfer" in inject and shot.exit_code == 0 and len(shot.named("injected")) == 1:
        pytest.skip("this plan moves no layer to or from the second rank")
    assert_equal_runs(shot, undisturbed(STEPS), kills=2 if inject else 1)
    decided = [(event["generation"], event["policy"], event["planned"]) for event in shot.named("decision")]
    assert decided[:2] == [(1, "initial", False), (2, "reroute", False)]
    assert (3, "fill", True) in decided
    if not inject:
        assert decided[2:] == [(3, "fill", True), (4, "replan", True)]
        assert [switch.policy for switch in shot.run.switches] == ["fill", "replan"]
        assert [one.policy for one in shot.run.recoveries] == ["reroute"]


@pytest.mark.parametrize(
    "inject",
    [
        "",
        "rank=3,step=-1,at=forward,generation=3",
        "rank=7,step=-1,at=groups,generation=3",
        "rank=2,step=-1,at=agreement,generation=3",
        "rank=6,step=-1,at=optimizer,generation=3",
        "rank=0,step=-1,at=param_gather,generation=3",
    ],
)
@pytest.mark.parametrize("spare", ["device", "host"])
def test_lost_copies_of_optimizer_state_are_made_anew_behind_a_step(
    jobs, undisturbed, profile, name, inject, spare
):
    flags = (
        f"{STEPS} --use-distributed-optimizer --odyssey-spare-state {spare} --odyssey-policy reroute "
        f"--odyssey-profile {profile} --odyssey-inject rank=5,step=0,at=backward;{inject}"
    )
    shot = jobs.run(name, ranks=8, stages=2, flags=flags)
    assert_equal_runs(shot, undisturbed(STEPS), kills=2 if inject else 1)
    decided = [(event["generation"], event["policy"], event["planned"]) for event in shot.named("decision")]
    assert decided[:3] == [(1, "initial", False), (2, "reroute", False), (3, "reroute", True)]
    assert_made_anew(shot, lost=5)


def assert_made_anew(shot, *, lost):
    """The places of worker ``lost`` were empty at first, and then there were none."""
    first, without, again = (event["layout"]["keepers"] for event in shot.named("decision")[:3])
    assert without == [[NOBODY if worker == lost else worker for worker in ring] for ring in first]
    assert any(NOBODY in ring for ring in without)
    assert not any(NOBODY in ring for ring in again)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("cells", "workers", "more"),
    [
        (CONTEXT, 4, ""),
        (f"{CONTEXT} --share-embeddings-and-output-weights", 4, "--odyssey-spare-state host"),
        (CONTEXT, 5, "--odyssey-redundancy-level 2"),
        (GANG, 4, ""),
    ],
    ids=["contexts", "contexts-on-the-host", "contexts-three-owners", "gangs"],
)
@pytest.mark.parametrize(
    "inject", ["", ";rank=6,step=-1,at=param_gather,generation=3", ";rank=7,step=-1,at=agree,generation=3"]
)
def test_lost_copies_of_stretches_and_lanes_are_made_anew_behind_a_step(
    jobs, undisturbed, tmp_path, name, cells, workers, more, inject
):
    """Of cells of two ranks: each of them makes what it keeps anew, or all of them if they are lanes of a gang. Worker
    3, which may be lost on the way, keeps nothing together with worker 1.
    """
    job = f"{cells} {STEPS} --lr 1e-3"
    measured = undisturbed(job, ranks=2 * workers)
    flags = (
        f"{job} --use-distributed-optimizer {more} --odyssey-policy reroute "
        f"--odyssey-profile {slow_links(measured, tmp_path / 'slow_links.json')} "
        f"--odyssey-inject rank=3,step=0,at=backward{inject}"
    )
    shot = jobs.run(name, ranks=2 * workers, stages=1, flags=flags)
    assert_equal_runs(shot, measured, kills=2 if inject else 1)
    decided = [(event["policy"], event["planned"]) for event in shot.named("decision")]
    assert decided[:3] == [("initial", False), ("reroute", False), ("reroute", True)]
    assert_made_anew(shot, lost=1)


@pytest.mark.parametrize(
    ("stages", "flags"),
    [
        (4, ""),
        (2, "--use-distributed-optimizer --odyssey-policy reroute"),
    ],
)
def test_layers_move_beside_messages(jobs, undisturbed, profile, name, stages, flags):
    """With a group for each (sender, receiver), as on NCCL: what moves has groups of its own."""
    flags = f"{STEPS} {flags} --odyssey-profile {profile} --odyssey-inject rank=5,step=0,at=backward"
    shot = jobs.run(name, ranks=8, stages=stages, flags=flags, script=PAIRS)
    assert_equal_runs(shot, undisturbed(STEPS), kills=1)
    assert shot.run.switches, "nothing has moved behind the steps"
