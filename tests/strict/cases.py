"""Random jobs, and what happens to them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from odyssey_megatron.launch.coordinator.reactions import JobState
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.execute import stack
from tests.strict.job import Case, Kill

SHAPES = ((1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1))
"""(stages, replicas)."""
SLICED = ((1, 3), (1, 4), (1, 5), (2, 3), (3, 3))
"""Those in which a layer's optimizer state is cut over more holders than there are copies."""
TIGHT = {"one_queue": True, "resident": 2}
"""The least that devices must have: one hardware queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1, and room for two kernels
that wait for other ranks.
"""
DEVICES = pytest.mark.parametrize("device", [{}, TIGHT], ids=["roomy", "tight"])
POINTS = ("forward", "backward", "weight_grad", "reduce", "agreement", "optimizer", "commit")
PHASES = ("groups", "connect", "agree", "transfer")


def profile(draw: random.Random | None = None, *, tied: bool = False) -> Profile:
    """Of the stack; with ``draw`` its layers cost unlike times, so that schedules and partitions are others. Each
    layer is summed by itself, beside the others.
    """
    same = stack.profile(tied=tied)
    same = replace(same, costs=replace(same.costs, bucket_bytes=0))
    if draw is None:
        return same
    layers = tuple(
        replace(
            one,
            forward_s=one.forward_s * draw.uniform(0.3, 3.0),
            input_grad_s=one.input_grad_s * draw.uniform(0.3, 3.0),
            weight_grad_s=one.weight_grad_s * draw.uniform(0.0, 3.0),
        )
        for one in same.costs.layers
    )
    return replace(same, costs=replace(same.costs, layers=layers))


def healthy(*, stages=2, replicas=2, steps=2, **others):
    """A job in which nobody dies, but for what ``others`` say."""
    return Case(stages=stages, replicas=replicas, steps=steps, profile=profile(), **others)


def case(
    number: int, *, copies: int = 0, tied: bool = False, evaluates: bool = False, times_links: bool = False
) -> Case:
    """The job of that number: one or two ranks die anywhere, perhaps one more in the recovery. ``copies``: of slices of
    optimizer state; 0: every holder keeps all. The others: see :class:`Case`.
    """
    draw = random.Random(number)
    stages, replicas = draw.choice(SLICED if copies else SHAPES)
    points = (
        POINTS + ("param_gather",) * bool(copies) + ("evaluate",) * evaluates + ("exchange",) * times_links
    )
    ranks = stages * replicas
    redundancy = (
        draw.choice(("state", "compute")) if replicas == 1 else draw.choice(("off", "state", "compute"))
    )
    kills = [
        Kill(rank=draw.randrange(ranks), step=draw.randrange(2), point=draw.choice(points))
        for _ in range(draw.choice((0, 1, 1, 1, 2)))
    ]
    if kills and draw.random() < 0.3:
        kills.append(replace(kills[0], rank=draw.randrange(ranks), point=draw.choice(PHASES), generation=2))
    lost = {one.rank for one in kills}
    if len(lost) == ranks:
        kills = kills[:1]
    return Case(
        stages=stages,
        replicas=replicas,
        profile=profile(draw, tied=tied),
        steps=3 if copies else 2,
        copies=copies,
        kills=tuple(kills),
        tied=tied,
        evaluates=evaluates,
        flags={"policy": draw.choice(("auto", "reroute", "replan")), "redundancy": redundancy}
        | (LINKS if times_links else {}),
    )


GANGS = (
    {"expert": 2},
    {"expert": 4},
    {"context": 2, "expert": 2},
    {"context": 2, "expert": 4},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert": 4},
)
"""Sizes of gangs, of 2 to 8 ranks: each exchanges rows with all-to-alls, and over context- and tensor-parallel ranks
besides.
"""


def gangs(number: int, *, copies: int = 0) -> Case:
    """The job of that number, of gangs: as :func:`case`."""
    draw = random.Random(f"gangs {number}")
    alone = Case(stages=1, replicas=1, profile=profile(draw), **draw.choice(GANGS))
    small = len(alone.ranks) == 2
    shapes = ((1, 2), (2, 1), (2, 2), *(((1, 3), (3, 1)) if small else ()))
    if copies:
        shapes = ((1, 3), *(((1, 4), (2, 3)) if small else ()))
    stages, replicas = draw.choice(shapes)
    points = POINTS + ("param_gather",) * bool(copies)
    size, workers = len(alone.ranks), stages * replicas
    kills = [
        Kill(rank=draw.randrange(workers * size), step=draw.randrange(2), point=draw.choice(points))
        for _ in range(draw.choice((0, 1, 1, 1, 2)))
    ]
    if kills and draw.random() < 0.3:
        rank, point = draw.randrange(workers * size), draw.choice(PHASES)
        kills.append(replace(kills[0], rank=rank, point=point, generation=2))
    if len({one.rank // size for one in kills}) == workers:
        kills = kills[:1]
    redundancy = "state" if replicas == 1 else draw.choice(("off", "state"))
    return replace(
        alone,
        stages=stages,
        replicas=replicas,
        steps=2,
        copies=copies,
        kills=tuple(kills),
        **(TIGHT if draw.random() < 0.5 else {}),
        flags={"policy": draw.choice(("auto", "reroute", "replan")), "redundancy": redundancy},
    )


LINKS = {"time_links": "on", "profile_steps": 1}
"""Before each step but the first of a generation links are timed."""


def heavy(of: Profile) -> Profile:
    """Layers take so long to move that it pays to go on by routes alone first."""
    costs = replace(of.costs, link_bytes_per_s=1e9, link_latency_s=0.0)
    layers = tuple(replace(one, state_bytes=10**8) for one in of.costs.layers)
    return replace(of, costs=replace(costs, layers=layers), group_build_s=0.0)


def fewer_stages(planner: PolicyPlanner, job: JobState) -> Plan:
    """Twice as many pipelines of half as many stages: most layers move."""
    assert job.start_plan is not None
    spec = replace(planner.job, pipeline_model_parallel_size=len(job.start_plan.layout.routes[0].hops) // 2)
    return initial_plan(spec, job.cluster, profile())


KINDS = ("come back", "two speeds", "move", "leave")
"""What changes plans between steps."""


def changing(kind: str, number: int, *, copies: int = 0) -> Case:
    """A job that changes its plan between two steps. From ``number`` 1 on somebody dies anywhere on the way."""
    draw = random.Random(f"{kind} {number}")
    stages, replicas = draw.choice(((2, 3), (2, 2)) if not copies else ((2, 3), (2, 4)))
    if kind == "two speeds":
        stages, replicas = 4, 2
    ranks = stages * replicas
    first = Kill(rank=draw.randrange(ranks), step=0, point=draw.choice(POINTS), leaves=kind == "leave")
    kills = [first] * (kind != "move")
    if number:
        points = (*POINTS, *PHASES, *(("param_gather",) if copies else ()))
        generation = draw.choice((2, 3, 4) if kills else (1, 2, 3))
        others = [rank for rank in range(ranks) if not kills or rank != first.rank]
        step, point = draw.randrange(4), draw.choice(points)
        kills.append(
            Kill(
                rank=draw.choice(others),
                step=-1 if point in PHASES else step,
                point=point,
                generation=generation,
            )
        )
    return Case(
        stages=stages,
        replicas=replicas,
        profile=heavy(profile()) if kind == "two speeds" else profile(draw),
        steps=8,
        copies=copies,
        kills=tuple(kills),
        flags={"policy": "auto" if kind == "two speeds" else draw.choice(("auto", "reroute", "replan"))},
        respawns=1 if kind in ("come back", "leave") else 0,
        aim=fewer_stages if kind == "move" else None,
    )
