"""One worker of 32 becomes slow in the middle of a job of emulated accelerators; by the wall clock, for ``slow.py``.

Launcher, coordinator, groups, messages, agreement, measurements, verdict, ``decide()``, offer and change of plan are
the product's; only compute is a sleep. The planner is told nothing: it has what the ranks measure of their
accelerators, noise included. Each job has its healthy steps, those that are slow until the plan changes, and those of
the plan that it ends with, so that all are of one machine in one state. Where the plan stays, since no other is 3 %
faster, those that it ends with are the slow ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.metrics.run import Run
from odyssey_megatron.metrics.steps import CommittedStep
from odyssey_megatron.policy.profile import Profile
from tests.benchmarks import emulated_jobs
from tests.benchmarks.model_error import OPTIMIZER_S, times
from tests.benchmarks.policies import profile_of
from tests.execute.emulation import Emulation, Truth
from tests.launch.jobserver import JobServer

SLOW = 13
SLOW_FROM, STEPS = 4, 16
NOISE = 0.02
"""As of real instructions: 1.5 % of a forward, 2.1 % of a backward (``tests/diagnosis/simulated.py``)."""
SECONDS_A_LAYER = 0.05
"""A step of 11 s: 32 ranks on two cores take half a second to change their plan, 8 a tenth of that."""


def emulation_of(
    dp: int, pp: int, microbatches: int, speed: float, who: tuple[int, ...]
) -> tuple[Emulation, Truth]:
    """The job of a setting of ``policies.py``, with the memory of a 7B model and 1F1B's of one microbatch more."""
    known = profile_of(pp, 1, 4).costs
    layers = tuple(times(layer, SECONDS_A_LAYER) for layer in known.layers)
    known = replace(known, layers=layers, message_bytes=0, optimizer_s=OPTIMIZER_S)
    job = JobSpec(
        num_layers=len(layers),
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=1,
        num_microbatches=dp * microbatches,
        tokens_per_step=dp * microbatches,
        train_steps=STEPS,
    )
    truth = Truth(costs=known, noise=NOISE, reduce_latency_s=0.0, reduce_bytes_per_s=known.link_bytes_per_s)
    slowed = tuple((one, speed, SLOW_FROM) for one in who)
    return Emulation(job=job, profile=Profile(costs=known), slowed=slowed), truth


def measured(
    server: JobServer,
    folder: Path,
    dp: int,
    pp: int,
    microbatches: int,
    speed: float,
    who: tuple[int, ...] = (SLOW,),
) -> dict[str, Any]:
    """Of one job; raises RuntimeError if it fails."""
    emulation, truth = emulation_of(dp, pp, microbatches, speed, who)
    name = f"dp{dp}_pp{pp}_m{microbatches}_speed{speed}" + "_node" * (len(who) > 1)
    run = emulated_jobs.run(
        server, folder / name, emulation, dp * pp,
        "--odyssey-rebalance", "auto", "--odyssey-profile-steps", 1, "--odyssey-build-timeout-s", 30,
        "--odyssey-hang-s", 30, truth=truth, within_s=600,
    )  # fmt: skip
    return {"setting": name, **_figures(run, dp * pp, len(who), speed)}


def _figures(run: Run, workers: int, slow: int, speed: float) -> dict[str, Any]:
    changes = [one for one in run.switches if one.step > SLOW_FROM]

    def median(since: int, until: int, of: Callable[[CommittedStep], float | None]) -> float:
        return statistics.median(took for one in run.steps if since <= one.step < until and (took := of(one)))

    def figures(of: Callable[[CommittedStep], float | None]) -> tuple[float, float, float]:
        """Of a step: healthy, slow, and at last."""
        healthy = median(2, SLOW_FROM, of)
        if not changes:
            slow = median(SLOW_FROM, STEPS, of)
            return healthy, slow, slow
        return healthy, median(SLOW_FROM, changes[0].step, of), median(changes[-1].step + 1, STEPS, of)

    healthy, nothing, after = figures(lambda one: one.losses["modelled_s"])
    wall_healthy, wall_nothing, wall_after = figures(lambda one: one.interval_s)
    until = changes[-1].step if changes else SLOW_FROM
    return {
        "healthy_s": healthy,
        "nothing_s": nothing,
        "mended_s": after,
        "of_share": healthy * workers / (workers - slow * (1 - speed)) / after,
        "over_nothing": nothing / after,
        "over_nothing_wall": wall_nothing / wall_after,
        "steps_until_mended": until - SLOW_FROM,
        "seconds_until_mended": sum(
            one.interval_s or 0.0 for one in run.steps if SLOW_FROM <= one.step < until
        ),
        "stall_of_step": max((one.stall_s for one in changes), default=0.0) / wall_healthy,
        "policy": changes[-1].policy if changes else "the plan stays",
    }
