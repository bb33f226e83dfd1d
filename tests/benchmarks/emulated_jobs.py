"""Jobs of emulated accelerators (``tests/execute/emulated.py``) for the benchmarks: what they are, and running them.

What layers, messages and sums really take stands in a table that the planner never sees (``uneven``): no two layers
alike, a last stage twice as dear, each instruction longer or shorter than the last time, slower links, sums at a rate
of their own. The planner starts from an estimate that is wrong by a factor, and has what the ranks measure and publish.
The optimizer takes what one takes, and no more: a long one would hide the agreement between ranks that runs beside it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.metrics.run import Run, read_run
from odyssey_megatron.metrics.steps import CommittedStep
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.policy.costs.profile import Profile, load_profile
from tests.benchmarks.bars import taken
from tests.execute.emulation import Emulation, Truth
from tests.launch.jobserver import CHECKOUT, ENVIRONMENT, JobServer, events

NOISE = 0.05
UNLIKE = 0.1
"""A layer takes up to so much more or less than the next one."""
ESTIMATED = 0.5
"""What the planner believes of a layer before anybody has measured, as a share of the truth."""
OPTIMIZER_S = 0.01
"""Of two transformer layers."""
KNOWN_AT = 6
"""The step from which on a decision goes by what the ranks have measured. Whoever kills earlier is told."""


def layer(work_s: float, **sizes: int) -> LayerCost:
    """Forward, input gradient and weight gradient take ``work_s`` each. Without ``sizes`` memory does not matter, but
    activations are much more than parameters, as they are.
    """
    small = {"weight_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 2, "state_bytes": 2}
    known = {"activation_bytes": 34} | small | sizes
    return LayerCost(forward_s=work_s, input_grad_s=work_s, weight_grad_s=work_s, **known)


def times(layer: LayerCost, factor: float, of: LayerCost | None = None) -> LayerCost:
    """A layer that takes so many times as long, with the bytes ``of`` another one."""
    return replace(
        of or layer,
        forward_s=layer.forward_s * factor,
        input_grad_s=layer.input_grad_s * factor,
        weight_grad_s=layer.weight_grad_s * factor,
    )


def uneven(costs: Costs, *, head: float, seed: int) -> Truth:
    """What really happens where ``costs`` were believed.

    No two layers are alike, and the head takes the time of ``head`` layers: with as many as a middle stage has, the
    last stage takes twice a middle one's time. Links are a little worse than the planner is told, and sums go at half
    the rate of a message.
    """
    rng = random.Random(seed)
    layers = [times(layer, 1 + rng.uniform(-UNLIKE, UNLIKE)) for layer in costs.layers]
    layers[-1] = times(costs.layers[1], head, of=layers[-1])
    real = replace(
        costs,
        layers=tuple(layers),
        optimizer_s_per_byte=OPTIMIZER_S / 2 / costs.layers[1].optimizer_bytes,
        link_latency_s=1.5 * costs.link_latency_s,
        link_bytes_per_s=0.8 * costs.link_bytes_per_s,
    )
    return Truth(
        costs=real,
        noise=NOISE,
        reduce_latency_s=costs.link_latency_s,
        reduce_bytes_per_s=0.4 * costs.link_bytes_per_s,
    )


def estimate(costs: Costs) -> Costs:
    """What a planner may believe: all layers alike, and all of it wrong by a factor."""
    layers = tuple(times(layer, ESTIMATED) for layer in costs.layers)
    return replace(costs, layers=layers, agreement_s=0.0)


def emulation(
    middle: LayerCost, end: LayerCost, *, stages: int, microbatches: int, steps: int, **how: Any
) -> tuple[Emulation, Truth]:
    """A job of two transformer layers a stage, and what really happens in it.

    ``end`` is the embedding, and has the bytes of the head, whose time is :func:`uneven`'s. ``how``: of the emulation.
    """
    costs = Costs(
        layers=(end, *(middle,) * (2 * stages), end),
        message_bytes=300_000,  # most of a message's time: its rate, by which sums are planned, is measured
        link_latency_s=0.0002,
        link_bytes_per_s=1e9,
    )
    job = JobSpec(
        num_layers=len(costs.layers),
        pipeline_model_parallel_size=stages,
        tensor_model_parallel_size=1,
        num_microbatches=microbatches,
        tokens_per_step=microbatches,
        train_steps=steps,
    )
    known = Profile(costs=estimate(costs))
    return Emulation(job=job, profile=known, **how), uneven(costs, head=2, seed=stages)


def run(
    server: JobServer,
    folder: Path,
    emulation: Emulation,
    truth: Truth,
    ranks: int,
    *flags: object,
    within_s: float = 180,
) -> Run:
    """One job, its run folder ``folder``, to its end. Raises RuntimeError if it fails."""
    emulation.save(folder, truth)
    script = CHECKOUT / "tests" / "execute" / "emulated.py"
    every_step = ("--odyssey-profile-steps", 1)
    job = server.run(
        ["--nproc-per-node", ranks, script, "--odyssey-device", "cpu", "--odyssey-run-dir", folder, *every_step,
         *flags],
        log=folder.parent / f"{folder.name}.log",
        env=ENVIRONMENT,
    )  # fmt: skip
    if job.wait(within_s) != 0:
        raise RuntimeError(job.log()[-3000:])
    return read_run(folder)


def measured_costs(folder: Path) -> Costs:
    """What the ranks of a job that has ended had measured.

    Raises RuntimeError if the planner did not know it yet when it first had to decide after the start.
    """
    decisions, measured = events(folder, "decision"), events(folder, "measured")
    if decisions[1:] and not (measured and measured[0]["t_s"] < decisions[1]["t_s"]):
        raise RuntimeError(f"{folder.name}: a worker was lost before the planner knew what layers take")
    return load_profile(folder).costs


def runtimes_s(steps: Iterable[CommittedStep]) -> list[float]:
    """Of each step, what is neither compute nor a link: from commit to commit, without what the table says."""
    return [taken(one.interval_s, f"step {one.step}") - one.losses["modelled_s"] for one in steps]


def start_server() -> JobServer:
    """The process that such jobs are forked from."""
    return JobServer.start(["tests.execute.preload"])
