"""Routes that visit workers twice, down the stages and up or down again: as exact as any other, whatever fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.policy.costs.profile import Profile
from tests.e2e.jobs import assert_equal_runs
from tests.plan.samples import layer, uniform_costs

pytestmark = pytest.mark.matrix

RANKS, STAGES = 6, 3
"""As many workers are two pipelines of three, of which the first has embedding and head, and the last is where routes
turn; or three of two, through which routes go down twice.
"""

UNIT = 2**30


TIED = "--share-embeddings-and-output-weights"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


def profile(tmp_path, *, tied, room):
    """With memory for little more than 1F1B's activations, so that pipelines whose workers are visited twice have the
    shortest step.
    """
    one = layer(1e-3, 1e-3, 1e-3, UNIT)
    one = replace(one, weight_bytes=UNIT, gradient_bytes=UNIT, optimizer_bytes=2 * UNIT)
    found = uniform_costs(6, ends=True)
    layers = (found.layers[0], *(one,) * 6, found.layers[-1])
    found = replace(found, layers=layers, link_bytes_per_s=1e12, memory_bytes=room * UNIT)
    path = tmp_path / "turning.json"
    Profile(costs=replace(found, tied=layer() if tied else None), group_build_s=0.0).save(path)
    return path


TURNING = {
    "first-in-backward": ("reroute", "rank=0,step=2,at=backward,microbatch=4", ""),
    "turn-in-forward": ("reroute", "rank=3,step=2,at=forward,microbatch=7", DROPOUT),
    "two-in-a-row": ("reroute", "rank=2,step=1,at=reduce;rank=1,step=3,at=weight_grad", ""),
    "first-in-agreement": ("replan", "rank=4,step=2,at=agreement", TIED),
    "turn-in-optimizer": ("auto", "rank=2,step=2,at=optimizer", ""),
    "first-in-commit": ("auto", "rank=0,step=2,at=commit", TIED),
    "in-groups": ("replan", "rank=1,step=2,at=forward;rank=3,step=2,at=groups,generation=2", ""),
    "in-agree": ("reroute", "rank=3,step=2,at=backward;rank=0,step=2,at=agree,generation=2", TIED),
}

INTERLEAVED = {
    "first-in-backward": ("reroute", "rank=0,step=2,at=backward", TIED),
    "last-in-forward": ("auto", "rank=5,step=2,at=forward", DROPOUT),
    "two-in-a-row": ("reroute", "rank=2,step=1,at=reduce;rank=1,step=3,at=weight_grad", ""),
    "in-agree": ("replan", "rank=0,step=2,at=forward;rank=3,step=2,at=agree,generation=2", TIED),
}


@pytest.fixture
def shot(jobs, undisturbed, tmp_path, name):
    """(case, memory of a worker in units) -> the workers that each route of the job's first plan goes through."""

    def run(case, room):
        policy, inject, model = case
        found = profile(tmp_path, tied=model == TIED, room=room)
        flags = f"{model} --odyssey-layout auto --odyssey-profile {found} --odyssey-policy {policy}"
        outcome = jobs.run(name, ranks=RANKS, stages=STAGES, flags=f"{flags} --odyssey-inject {inject}")
        assert_equal_runs(outcome, undisturbed(model), kills=inject.count("rank="))
        first = outcome.named("decision")[0]["layout"]
        return [[hop["worker"] for hop in route["hops"]] for route in first["routes"]]

    return run


@pytest.mark.parametrize("case", TURNING)
def test_a_job_whose_routes_turn(shot, case):
    hops = shot(TURNING[case], 20)
    assert sorted(map(len, hops)) == [5, 5]
    assert all(one == one[::-1] for one in hops), "down, and up again through the same workers"


@pytest.mark.parametrize("case", INTERLEAVED)
def test_a_job_whose_routes_go_down_twice(shot, case):
    hops = shot(INTERLEAVED[case], 22)
    assert sorted(map(len, hops)) == [4, 4, 4]
    assert all(one[:2] == one[2:] for one in hops), "down, and down again through the same workers"
