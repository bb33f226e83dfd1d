"""How much longer steps are for the sums of gradients, by the wall clock, on emulated accelerators.

    python tests/benchmarks/overlap.py --json

64 processes under ``odyssey run``, with its launcher, coordinator, groups, interpreter, gloo messages and agreement;
only compute is a sleep, and a sum takes its time from when all its holders have come to it, beside what they compute
(``tests/execute/emulated.py``). What sleeps, messages and sums take the planner does not see
(``emulated_jobs.uneven``): it places sums by an estimate that is wrong by a factor. Each setting runs twice, with
gradients and with none. ``wall`` is the mean step from commit to commit beside the other's; ``modelled`` the same by
the deadlines that messages carry; ``at_the_end`` what the planner's clock says of the true costs if all sums ran behind
all compute; ``runtime_s`` what steps take beyond compute and links.

``room``: 64 holders of a whole model, 400 MB of gradients, four microbatches of 1.1 s, links of 5 GB/s: the ratios are
those of 0.22 s and 25 GB/s, five times as slow, so that 64 processes that share two cores are not late.
``slices``: the same with optimizer state cut over the 64, and 200 MB of new weights that are gathered beside the next
step's first forwards.
``tight``: four stages of 16 replicas, 1F1B's memory, 0.8 GB of gradients a worker: the weight gradients of one
microbatch are too short to hide sums beside, so that on the first stage the last input gradient is needed, too.

What it cannot show: kernels that slow each other down, and links that messages and sums share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.plan.checking.simulate import step_end_s
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.policy.costs.profile import Profile
from tests.benchmarks import emulated_jobs
from tests.benchmarks.bars import at_most, finish, taken
from tests.execute.emulation import Emulation, Truth
from tests.launch.jobserver import JobServer

WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A job of 64 workers."""

    stages: int
    layers: int
    microbatches: int
    """Of a pipeline."""
    layer_s: float
    """Of one layer: forward, input gradient and weight gradient, each."""
    gradient_bytes: int
    """Of a worker."""
    weight_bytes: int = 0
    copies: int = 0
    """Of each slice of optimizer state: sums go to those who keep it, and new weights to all others."""
    bytes_per_s: float
    most: float
    """The bar."""


SETTINGS = {
    "room": Setting(
        stages=1, layers=12, microbatches=4, layer_s=0.0306, gradient_bytes=400 * 10**6, bytes_per_s=5e9, most=1.02
    ),
    "slices": Setting(
        stages=1, layers=12, microbatches=4, layer_s=0.0306, gradient_bytes=400 * 10**6, weight_bytes=200 * 10**6,
        copies=2, bytes_per_s=5e9, most=1.02,
    ),
    "tight": Setting(
        stages=4, layers=48, microbatches=8, layer_s=0.0125, gradient_bytes=800 * 10**6, bytes_per_s=5e9, most=1.03
    ),
}  # fmt: skip


def emulation_of(one: Setting, steps: int, *, sent: bool) -> tuple[Emulation, Truth]:
    """``sent``: with gradients, and weights, that take time on their way. The head takes a layer's time."""
    layers = one.layers // one.stages
    middle = LayerCost(
        forward_s=one.layer_s, input_grad_s=one.layer_s, weight_grad_s=one.layer_s, activation_bytes=34,
        weight_bytes=one.weight_bytes * sent // layers, gradient_bytes=one.gradient_bytes * sent // layers,
        optimizer_bytes=2, state_bytes=2,
    )  # fmt: skip
    end = LayerCost(
        forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0, activation_bytes=34,
        weight_bytes=1, gradient_bytes=0, optimizer_bytes=2, state_bytes=2,
    )  # fmt: skip
    costs = Costs(
        layers=(end, *(middle,) * one.layers, end),
        message_bytes=10**5,  # a message leaves a rate to measure
        link_latency_s=1e-5,
        link_bytes_per_s=one.bytes_per_s,
    )
    total = WORKERS // one.stages * one.microbatches
    job = JobSpec(
        num_layers=len(costs.layers), pipeline_model_parallel_size=one.stages, tensor_model_parallel_size=1,
        num_microbatches=total, tokens_per_step=total, train_steps=steps, optimizer_copies=one.copies,
    )  # fmt: skip
    known = Profile(costs=emulated_jobs.estimate(costs))
    return Emulation(job=job, profile=known, seamless=True), emulated_jobs.uneven(
        costs, head=1.0, seed=one.stages
    )


def at_the_end_s(emulation: Emulation, truth: Truth) -> float:
    """A step whose sums all run behind what is computed, by the planner's clock at the true costs."""
    job, costs = emulation.job, truth.costs
    layout = megatron_layout(
        num_layers=job.num_layers,
        pipeline_size=job.pipeline_model_parallel_size,
        num_workers=WORKERS,
        num_microbatches=job.num_microbatches,
    )
    return step_end_s(layout, costs, order_routes(layout, costs).done_s)


def measured(server: JobServer, folder: Path, emulation: Emulation, truth: Truth) -> tuple[float, float]:
    """Of a step: by the wall clock the mean, as lateness is made up for in the next one; by deadlines the median."""
    flags = ("--odyssey-build-timeout-s", 60, "--odyssey-trace-steps", 0)
    steps = emulated_jobs.run(server, folder, emulation, truth, WORKERS, *flags).steps[1:]
    wall_s = statistics.mean(taken(step.interval_s, f"step {step.step}") for step in steps)
    return wall_s, statistics.median(step.losses["modelled_s"] for step in steps)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="default: all")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    result, bars = {}, []
    server = emulated_jobs.start_server()
    try:
        with tempfile.TemporaryDirectory() as name:
            for setting in options.setting or SETTINGS:
                one = SETTINGS[setting]
                jobs = [emulation_of(one, options.steps, sent=sent) for sent in (True, False)]
                (sums_s, sums_modelled_s), (none_s, none_modelled_s) = (
                    measured(server, Path(name, f"{setting}{at}"), *job) for at, job in enumerate(jobs)
                )
                result[setting] = {
                    "step_s": round(sums_s, 4),
                    "without_s": round(none_s, 4),
                    "wall": round(sums_s / none_s, 4),
                    "modelled": round(sums_modelled_s / none_modelled_s, 4),
                    "runtime_s, with sums, without": [sums_s - sums_modelled_s, none_s - none_modelled_s],
                    "at_the_end": round(at_the_end_s(*jobs[0]) / at_the_end_s(*jobs[1]), 4),
                }
                print(setting, result[setting], file=sys.stderr, flush=True)
                bars.append(at_most(f"{setting}_step_beside_one_without_sums", sums_s / none_s, one.most))
    finally:
        server.close()
    return finish(result, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
