"""Jobs of emulated accelerators (``tests/execute/emulated.py``) for the benchmarks: what they are, and running them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.metrics.run import Run, read_run
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.policy.costs.profile import Profile
from tests.execute.emulation import Emulation, Truth
from tests.launch.jobserver import CHECKOUT, ENVIRONMENT, JobServer


def layer(work_s: float, **sizes: int) -> LayerCost:
    """Forward, input gradient and weight gradient take ``work_s`` each. Without ``sizes`` memory does not matter, but
    activations are much more than parameters, as they are.
    """
    small = {"weight_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 2, "state_bytes": 2}
    known = {"activation_bytes": 34} | small | sizes
    return LayerCost(forward_s=work_s, input_grad_s=work_s, weight_grad_s=work_s, **known)


def emulation(
    middle: LayerCost,
    end: LayerCost,
    *,
    stages: int,
    microbatches: int,
    steps: int,
    optimizer_s: float = 0.0,
    **how: Any,
) -> Emulation:
    """A job of two transformer layers a stage; ``end`` is the embedding, and the head. ``how``: of the emulation."""
    costs = Costs(
        layers=(end, *(middle,) * (2 * stages), end),
        message_bytes=1,
        link_latency_s=0.0005,
        link_bytes_per_s=1e9,
        optimizer_s=optimizer_s,
    )
    job = JobSpec(
        num_layers=len(costs.layers),
        pipeline_model_parallel_size=stages,
        tensor_model_parallel_size=1,
        num_microbatches=microbatches,
        tokens_per_step=microbatches,
        train_steps=steps,
    )
    return Emulation(job=job, profile=Profile(costs=costs), **how)


def run(
    server: JobServer,
    folder: Path,
    emulation: Emulation,
    ranks: int,
    *flags: object,
    truth: Truth | None = None,
    within_s: float = 180,
) -> Run:
    """One job, its run folder ``folder``, to its end. Raises RuntimeError if it fails."""
    emulation.save(folder, truth)
    script = CHECKOUT / "tests" / "execute" / "emulated.py"
    job = server.run(
        ["--nproc-per-node", ranks, script, "--odyssey-device", "cpu", "--odyssey-run-dir", folder, *flags],
        log=folder.parent / f"{folder.name}.log",
        env=ENVIRONMENT,
    )
    if job.wait(within_s) != 0:
        raise RuntimeError(job.log()[-3000:])
    return read_run(folder)


def start_server() -> JobServer:
    """The process that such jobs are forked from."""
    return JobServer.start(["tests.execute.preload"])
