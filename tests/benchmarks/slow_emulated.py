"""A worker of 32, a node or a link becomes slow in the middle of a job of emulated accelerators, or its last stage is
heavy from the start; by the wall clock, for ``slow.py``.

Launcher, coordinator, groups, messages, agreement, measurements, verdict, ``decide()``, offer and change of plan are
the product's; only compute is a sleep. The planner is told nothing: it has what the ranks measure of their
accelerators, noise included. Each job has its healthy steps, those that are slow until the plan changes, and those of
the plan that it ends with, so that all are of one machine in one state. Where the plan stays, since no other is 3 %
faster, those that it ends with are the slow ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.metrics.run import Run
from odyssey_megatron.metrics.steps import CommittedStep
from odyssey_megatron.policy.costs.profile import Profile
from tests.benchmarks import emulated_jobs
from tests.benchmarks.bars import taken
from tests.benchmarks.emulated_jobs import OPTIMIZER_S, times
from tests.benchmarks.policies import profile_of
from tests.execute.emulation import Emulation, Truth
from tests.launch.jobserver import JobServer

SLOW = 13
SLOW_FROM, STEPS = 4, 16
NOISE = 0.02
"""As of real instructions: 1.5 % of a forward, 2.1 % of a backward (``tests/diagnosis/simulated.py``)."""
SECONDS_A_LAYER = 0.05
"""A step of 11 s: 32 ranks on two cores take half a second to change their plan, 8 a tenth of that."""


def emulation_of(dp: int, pp: int, microbatches: int, **how: Any) -> tuple[Emulation, Truth]:
    """The job of a setting of ``policies.py``, with the memory of a 7B model and 1F1B's of one microbatch more.
    ``how``: of the emulation.
    """
    known = profile_of(pp, 1, 4).costs
    layers = tuple(times(layer, SECONDS_A_LAYER) for layer in known.layers)
    known = replace(known, layers=layers, message_bytes=0, agreement_s=OPTIMIZER_S)
    job = JobSpec(
        num_layers=len(layers),
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=1,
        num_microbatches=dp * microbatches,
        tokens_per_step=dp * microbatches,
        train_steps=STEPS,
    )
    truth = Truth(costs=known, noise=NOISE, reduce_latency_s=0.0, reduce_bytes_per_s=known.link_bytes_per_s)
    return Emulation(job=job, profile=Profile(costs=known), **how), truth


def measured(
    server: JobServer,
    folder: Path,
    dp: int,
    pp: int,
    microbatches: int,
    speed: float,
    who: tuple[int, ...] = (SLOW,),
) -> dict[str, Any]:
    """Of one job with slow workers; raises RuntimeError if it fails."""
    slowed = tuple((one, speed, SLOW_FROM) for one in who)
    emulation, truth = emulation_of(dp, pp, microbatches, slowed=slowed)
    name = f"dp{dp}_pp{pp}_m{microbatches}_speed{speed}" + "_node" * (len(who) > 1)
    row = _row(name, _run(server, folder / name, emulation, truth, dp * pp), SLOW_FROM)
    share = dp * pp / (dp * pp - len(who) * (1 - speed))
    return {**row, "of_share": row["healthy_s"] * share / row["mended_s"]}


def with_a_slow_link(
    server: JobServer, folder: Path, dp: int, pp: int, microbatches: int, factor: float
) -> dict[str, Any]:
    """Of one job, whose messages take a twentieth of a stage's forward, and on one link, both ways, ``factor`` times
    that.
    """
    one, other = 0, dp
    """Neighbours in a pipeline."""
    emulation, truth = emulation_of(
        dp, pp, microbatches,
        slowed_links=((one, other, factor, SLOW_FROM), (other, one, factor, SLOW_FROM)),
    )  # fmt: skip
    message_s = 0.05 * truth.costs.spans.forward_s(0, emulation.job.num_layers) / pp
    costs = replace(truth.costs, link_latency_s=message_s)
    emulation, truth = replace(emulation, profile=Profile(costs=costs)), replace(truth, costs=costs)
    name = f"dp{dp}_pp{pp}_m{microbatches}_link_times{factor:g}"
    run = _run(server, folder / name, emulation, truth, dp * pp, "--odyssey-time-links", "on")
    row = _row(name, run, SLOW_FROM)
    return {**row, "of_healthy": row["healthy_s"] / row["mended_s"]}


def with_a_heavy_head(server: JobServer, folder: Path, dp: int, pp: int, microbatches: int) -> dict[str, Any]:
    """Of one healthy job, whose head takes two layers' time. The planner believes that it takes none."""
    emulation, truth = emulation_of(dp, pp, microbatches)
    *others, head = truth.costs.layers
    head = times(others[-1], 2.0, of=head)
    truth = replace(truth, costs=replace(truth.costs, layers=(*others, head)))
    name = f"dp{dp}_pp{pp}_m{microbatches}_heavy"
    row = _row(name, _run(server, folder / name, emulation, truth, dp * pp), 0)
    before_s, after_s = row["nothing_s"], row["mended_s"]
    layers = len(others) - 1
    ideal_s = before_s * math.ceil((layers + 2) / pp) / (layers // pp + 2)
    return {**row, "of_gain": (before_s - after_s) / (before_s - ideal_s)}


def _run(
    server: JobServer, folder: Path, emulation: Emulation, truth: Truth, workers: int, *flags: str
) -> Run:
    return emulated_jobs.run(
        server, folder, emulation, truth, workers,
        "--odyssey-rebalance", "auto", "--odyssey-build-timeout-s", 30, "--odyssey-hang-s", 30, *flags,
        within_s=600,
    )  # fmt: skip


def _row(name: str, run: Run, slow_from: int) -> dict[str, Any]:
    """``slow_from``: the first step that is slow; 0 = all are, until the plan changes."""
    changes = [one for one in run.switches if one.step > slow_from]

    def median(since: int, until: int, of: Callable[[CommittedStep], float | None]) -> float | None:
        known = [took for one in run.steps if since <= one.step < until and (took := of(one))]
        return statistics.median(known) if known else None

    def figures(of: Callable[[CommittedStep], float | None]) -> tuple[float | None, ...]:
        """Of a step: healthy, slow, and at last."""
        healthy, since = median(2, slow_from, of), max(2, slow_from)
        if not changes:
            slow = median(since, STEPS, of)
            return healthy, slow, slow
        return healthy, median(since, changes[0].step, of), median(changes[-1].step + 1, STEPS, of)

    healthy, nothing, after = figures(lambda one: one.losses["modelled_s"])
    wall_healthy, wall_nothing, wall_after = figures(lambda one: one.interval_s)
    if nothing is None or after is None or wall_nothing is None or wall_after is None:
        raise RuntimeError(f"{name}: no step to measure; plans changed in {[one.step for one in changes]}")
    until = changes[-1].step if changes else slow_from
    return {
        "setting": name,
        "healthy_s": healthy,
        "nothing_s": nothing,
        "mended_s": after,
        "over_nothing": nothing / after,
        "over_nothing_wall": wall_nothing / wall_after,
        "steps_until_mended": until - slow_from,
        "seconds_until_mended": sum(
            taken(one.interval_s, f"{name}: step {one.step}")
            for one in run.steps
            if max(slow_from, 1) <= one.step < until  # nothing is committed before the first step
        ),
        "stall_of_step": max((one.stall_s for one in changes), default=0.0) / (wall_healthy or wall_nothing),
        "policy": changes[-1].policy if changes else "the plan stays",
    }
