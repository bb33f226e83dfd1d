"""Microbatches that go their own ways through workers that hold several layers: as exact as any other route."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.policy.costs.profile import Profile
from tests.e2e.jobs import assert_equal_runs
from tests.plan.samples import uniform_costs

pytestmark = pytest.mark.matrix

MODEL = "--num-layers 4 --global-batch-size 2"
"""On three workers: as one pipeline a step takes 12 units, and 10 where each microbatch takes its own way."""

CASES = {
    "backward": "rank=1,step=2,at=backward",
    "transfer": "rank=0,step=1,at=forward;rank=2,step=2,at=reduce",
    "optimizer": "rank=2,step=3,at=optimizer",
}


@pytest.mark.parametrize("case", CASES)
def test_a_job_whose_microbatches_go_their_own_ways(jobs, undisturbed, tmp_path, name, case):
    path = tmp_path / "few.json"
    costs = replace(uniform_costs(4, ends=True), memory_bytes=2**30)
    Profile(costs=costs, group_build_s=0.0).save(path)
    inject = CASES[case]
    flags = f"{MODEL} --odyssey-layout auto --odyssey-profile {path} --odyssey-redundancy state"
    flags += " --odyssey-redundancy-level 2" if ";" in inject else ""
    shot = jobs.run(name, ranks=3, stages=3, flags=f"{flags} --odyssey-inject {inject}")
    assert_equal_runs(shot, undisturbed(MODEL, ranks=3, stages=3), kills=inject.count("rank="))
    first = shot.named("decision")[0]["layout"]
    ways = [
        [(hop["worker"], hop["first"], hop["last"]) for hop in route["hops"]] for route in first["routes"]
    ]
    assert len(ways) == 2
    spans = {(worker, first, last) for way in ways for worker, first, last in way}
    assert len(spans) > len({worker for worker, *_ in spans}), (
        "some worker computes other layers of the other"
    )
    assert {worker for worker, *_ in ways[0]} & {worker for worker, *_ in ways[1]}


LEFT_OVER = "--num-layers 4 --global-batch-size 8"
"""On three of four workers: through whole pipelines a step takes 36 units, and 33 where two microbatches are left over
for several of them. A loss in the first step is planned for by the profile, and later ones by what a machine with other
work measures; so the first loss is in that step, where the plan matters."""


@pytest.mark.parametrize(
    "inject",
    [
        "rank=1,step=0,at=backward",
        "rank=3,step=0,at=forward;rank=0,step=3,at=weight_grad",
    ],
    ids=["backward", "two"],
)
def test_a_microbatch_that_is_left_over_goes_through_several_pipelines(
    jobs, undisturbed, tmp_path, name, inject
):
    path = tmp_path / "left.json"
    Profile(costs=replace(uniform_costs(4, ends=True), memory_bytes=2**30), group_build_s=0.0).save(path)
    flags = f"{LEFT_OVER} --odyssey-profile {path} --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=4, stages=1, flags=flags)
    assert_equal_runs(shot, undisturbed(LEFT_OVER, ranks=4, stages=1), kills=inject.count("rank="))
    chosen = [row["name"] for one in shot.named("decision") for row in one["candidates"] if row["chosen"]]
    assert "divide" in chosen


@pytest.mark.parametrize(
    ("inject", "ranks", "flags"),
    [
        ("rank=1,step=0,at=backward", 4, ""),
        ("rank=2,step=0,at=forward;rank=1,step=3,at=reduce", 4, ""),
        ("rank=1,step=0,at=reduce;rank=3,step=0,at=transfer", 4, "--odyssey-redundancy state"),
        ("rank=1,step=0,at=weight_grad", 6, ""),
        ("rank=4,step=0,at=backward;rank=2,step=3,at=backward", 6, "--use-distributed-optimizer"),
    ],
    ids=["one", "two", "state", "in a V", "slices"],
)
def test_a_gap_that_slides_from_stage_to_stage(jobs, undisturbed, tmp_path, name, inject, ranks, flags):
    """Of two or three pipelines of two stages one lacks a worker, and each of its microbatches another stage."""
    path, model = tmp_path / "gap.json", f"--num-layers 4 --global-batch-size {ranks}"
    Profile(costs=replace(uniform_costs(4, ends=True), memory_bytes=2**30), group_build_s=0.0).save(path)
    flags = f"{model} {flags}"
    shot = jobs.run(
        name, ranks=ranks, stages=2, flags=f"{flags} --odyssey-profile {path} --odyssey-inject {inject}"
    )
    assert_equal_runs(shot, undisturbed(flags, ranks=ranks, stages=2), kills=inject.count("rank="))
    assert "slide" in {one["policy"] for one in shot.named("decision")}
