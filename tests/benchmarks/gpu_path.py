"""What a GPU job would wait for that has not run on one: the host for its device, and ranks for their communicators.

    python tests/benchmarks/gpu_path.py --json

``host_waits``: of healthy steps under the rules of CUDA and NCCL (``tests/strict``), before their agreement. Counted,
on the product's own runtime.

``communicators``: of the rank that is in the most, for the plans that ``decide()`` makes of the four settings of
``tests/benchmarks/policies.py`` and of 16,384 GPUs, healthy (1) and with one worker dead (2). ``neighbours`` are those
that it sends messages or layers to, or gets them from. At most two of each neighbour, one of each block, and those of
its own cell. ``alike``: those of the second generation with the members of one of the first, which need not be
connected anew if they are clean; ``built``: the others. ``at_the_start``: of the first one, with the pair in which a
link is timed. ``host_groups``: those between hosts, of which the group of all is made.

``planned``: under the same rules as ``host_waits``, of generations that begin between two steps, how many communicators
the rank that connects most has connected, and how many it was said to: those with other members than before, or
another use. Of the first generation all.

``outlived``: under the same rules as ``host_waits``, of the communicators without the dead rank how many were kept
after a death behind the last step, and in the middle of one, and how many had to be connected again, and why:
``outstanding`` is what a host had given one, or both, that was not through when it heard of the failure. Hosts run
ahead, so that in the middle of a step all the rest of it may be. Of those that were clean on all members, with as much
given, none.

``model_s``: MODELLED, not measured: how long connecting them would take, side by side, by published times of NCCL;
``model_gib``: what they would take of a GPU's memory at most, also by published figures
(``odyssey_megatron/plan/placing/communicators.py``, which the doctor, ``odyssey plan`` and decisions ask, too: what it
counts from a layout is what ranks find in their programs).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Collection
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.layout import Route
from odyssey_megatron.plan.placing.communicators import Needs, communicators, connect_s
from odyssey_megatron.plan.placing.groups import WORLD, Channel, group_members, timed_pairs, way_of
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.schedule import MESSAGE
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.rebuild import hosts
from tests.benchmarks.bars import Bar, at_most, exactly, finish
from tests.benchmarks.played_ranks import job_of
from tests.benchmarks.policies import LAYERS, SETTINGS, WORKERS, costs

Groups = dict[str, tuple[int, ...]]


def groups_of(plan: Plan, worker: int, size: int, members: tuple[int, ...]) -> Groups:
    cell = Cell(rank=worker * size, size=size)
    named = group_members(plan, members, Cells(cell), tagged=False)
    return {name: ranks for name, ranks in named.items() if len(ranks) > 1 and name != WORLD}


def kinds(groups: Groups) -> Counter[tuple[tuple[int, ...], Channel | None]]:
    """By members and use, as communicators are taken over."""
    return Counter((ranks, way_of(name)) for name, ranks in groups.items())


def channels(groups: Groups) -> set[str]:
    return {name for name in groups if ">" in name}


def neighbours_of(plan: Plan, worker: int) -> set[int]:
    messages = {one.peer for one in plan.program(worker) if one.op in MESSAGE}
    moves = {
        end
        for one in plan.transfers
        for end in (one.source, one.target)
        if worker in (one.source, one.target)
    }
    return (messages | moves) - {worker}


def _around(route: Route, worker: int) -> list[int]:
    """Those next to ``worker`` on the route: whatever takes its place, they have it for a neighbour."""
    pairs = [(a.worker, b.worker) for a, b in pairwise(route.hops)]
    return [a if b == worker else b for a, b in pairs if worker in (a, b)]


def of_worker(
    worker: int,
    size: int,
    before: tuple[Plan, tuple[int, ...]],
    after: tuple[Plan, tuple[int, ...]],
    timed: Collection[tuple[int, int]],
) -> dict[str, Any]:
    """Of its first rank, for two plans, each with the ranks that are in."""
    (healthy, everyone), (plan, survivors) = before, after
    first, second = groups_of(healthy, worker, size, everyone), groups_of(plan, worker, size, survivors)
    alike = (kinds(first) & kinds(second)).total()
    neighbours = neighbours_of(plan, worker)
    others = sum(one.startswith(("block:", "cell:")) for one in second)
    return {
        "communicators": len(second),
        "neighbours": len(neighbours),
        "over": len(second) - 2 * len(neighbours) - others,
        "alike": alike,
        "built": len(second) - alike,
        "channels_built": len(channels(second) - channels(first)),
        "added_neighbours": len(neighbours - neighbours_of(healthy, worker)),
        "at_the_start": len(first) + (worker in chain.from_iterable(timed)),
        "host_groups": len(hosts.groups_of(survivors.index(worker * size), len(survivors))),
        "model_s": max((connect_s(len(ranks)) for ranks in second.values()), default=0.0),
    }


def counted(name: str, job: JobSpec, profile: Profile, workers: int) -> tuple[dict[str, Any], list[Bar]]:
    """Of one job, before and after the death of worker 5."""
    size = job.tensor_model_parallel_size
    nodes = tuple(rank // 8 for rank in range(workers * size))
    state = initial_state(nodes=nodes, cell_size=size)
    healthy = initial_plan(job, state, profile)
    state = apply(state, RankDied(rank=5 * size, code=-9, cause="killed"))
    config = OdysseyConfig(policy="reroute", horizon_s=1e9, mtbf_s=1e9)
    after = decide(job=job, state=state, previous=healthy, profile=profile, config=config, now_s=1.0).plan
    alive = [worker for worker in range(workers) if worker != 5]
    everyone, survivors = (
        tuple(range(workers * size)),
        tuple(w * size + at for w in alive for at in range(size)),
    )
    rows, timed = [], timed_pairs(healthy.layout, state.nodes)
    around = [one for route in healthy.layout.routes for one in _around(route, 5)]
    for worker in sorted({*alive[:: max(1, len(alive) // 256)], *around}):
        rows.append(of_worker(worker, size, (healthy, everyone), (after, survivors), timed))
    most = max(rows, key=lambda row: row["communicators"])
    worst_s = max(row["model_s"] for row in rows)
    cell, start = Cell(rank=0, size=size), Needs(healthy.layout)
    told = communicators(Needs(after.layout, after.transfers), cell, start)
    row = most | {
        "at_the_start": max(one["at_the_start"] for one in rows),
        "setting": name,
        "built": max(one["built"] for one in rows),
        "told_built": told.anew,
        "model_s": round(worst_s, 1),
        "model_gib": round(told.num_bytes / 2**30, 1),
    }
    return row, [
        exactly(f"{name}_communicators_told", told.count, most["communicators"]),
        exactly(f"{name}_communicators_to_connect_told", told.anew, row["built"]),
        exactly(
            f"{name}_communicators_told_at_the_start",
            communicators(start, cell, nodes=state.nodes).anew,
            row["at_the_start"],
        ),
        at_most(f"{name}_more_than_two_a_neighbour_and_one_a_block", max(one["over"] for one in rows), 0),
        at_most(
            f"{name}_channels_built_more_than_two_a_neighbour_that_is_new",
            max(one["channels_built"] - 2 * one["added_neighbours"] for one in rows),
            0,
        ),
        at_most(f"{name}_modelled_group_s", worst_s, 2.0),
    ]


def host_waits() -> dict[str, int]:
    """Layout -> how often hosts waited in all steps of all ranks before the agreement."""
    from tests.strict.cases import profile
    from tests.strict.job import Case, run

    found = {}
    for stages, replicas in ((1, 3), (2, 2), (3, 2), (4, 1)):
        ended = run(Case(stages=stages, replicas=replicas, profile=profile(), steps=3), seed=1)
        steps = [step for rank in ended.ranks for step in rank.syncs]
        assert len(steps) == ended.case.steps * len(ended.case.ranks), "each rank comes to each agreement"
        found[f"pp{stages}_dp{replicas}"] = sum(map(len, steps))
    return found


def planned() -> dict[str, dict[int, tuple[int, int]]]:
    """What changes plans between steps -> see ``strict.job.Ended.all_told_anew``."""
    from tests.strict.cases import KINDS, changing
    from tests.strict.job import run

    return {kind: run(changing(kind, 0), seed=1).all_told_anew for kind in KINDS}


def outlived() -> dict[str, dict[str, int]]:
    """When rank 0 of three stages and two replicas dies -> what became of communicators without it."""
    from tests.strict.cases import profile
    from tests.strict.job import Case, Kill, run

    found = {}
    for when, point, steps in (("behind the last step", "commit", 2), ("in a step", "backward", 3)):
        became = Counter[str]()
        for seed in range(3):
            kills = (Kill(rank=0, step=1, point=point),)
            case = Case(
                stages=3, replicas=2, profile=profile(), steps=steps, kills=kills, flags={"policy": "reroute"}
            )
            became += run(case, seed).outlived()
        found[when] = dict(became)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    waits = host_waits()
    bars = [exactly(f"{name}_host_waits", count, 0) for name, count in waits.items()]
    between = planned()
    for kind, generations in between.items():
        bars += [
            exactly(f"{kind.replace(' ', '_')}_{number}_connected", connected, told)
            for number, (connected, told) in generations.items()
        ]
    kept = outlived()
    behind = kept["behind the last step"]
    bars.append(exactly("connected_again_behind_a_step", sum(behind.values()) - behind["kept"], 0))
    clean = sum(one.get("clean", 0) for one in kept.values())
    bars.append(exactly("connected_again_though_clean_everywhere", clean, 0))
    rows = []
    jobs = []
    for dp, pp, microbatches in SETTINGS:
        profile = Profile(costs=costs(LAYERS // pp * (pp + 1), 0), group_build_s=0.0)
        job = JobSpec(
            num_layers=LAYERS + 2, pipeline_model_parallel_size=pp, tensor_model_parallel_size=1,
            num_microbatches=dp * microbatches, tokens_per_step=dp * microbatches, train_steps=1,
        )  # fmt: skip
        jobs.append((f"dp{dp}_pp{pp}_m{microbatches}", job, profile, WORKERS))
    jobs.append(("16384_gpus", *job_of("llama2-70b", 16384, 8, 16, 0), 2048))
    for one in jobs:
        row, more = counted(*one)
        rows.append(row)
        bars += more
        if not options.json:
            print(row, flush=True)
    result = {"host_waits": waits, "planned": between, "outlived": kept, "communicators": rows}
    return finish(result if options.json else {}, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
