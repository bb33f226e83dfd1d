"""The number of communicators that each rank will have, as far as the flags say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.doctor.rows import OK, CheckRow, Host, Job
from odyssey_megatron.inputs import Between
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.placing.communicators import Needs, communicators
from odyssey_megatron.plan.placing.redundancy import with_shadows

AREA = "communicators"
_SIZE = Between(1, 100_000, whole=True)
_NO_COSTS = LayerCost(
    forward_s=0, input_grad_s=0, weight_grad_s=0, activation_bytes=0, weight_bytes=0, gradient_bytes=0,
    optimizer_bytes=0, state_bytes=0,
)  # fmt: skip


def rows(host: Host, job: Job) -> Iterator[CheckRow]:
    """Yield the number of communicators of a job on GPUs, in the launch line's layout with all ranks alive.

    The number of layers of a stage makes no difference, so it has one.
    """
    if not job.config.uses_nccl:
        return
    try:
        stages = _size(job, "--pipeline-model-parallel-size")
        cell = Cell.of(
            0,
            tensor=_size(job, "--tensor-model-parallel-size"),
            context=_size(job, "--context-parallel-size"),
            expert=_size(job, "--expert-model-parallel-size"),
            expert_tensor=_size(job, "--expert-tensor-parallel-size", 0) or None,
        )
    except ValueError:
        return  # the job itself says which size is wrong
    known = _ranks(host.environ) // (stages * cell.size)
    pipelines = known or 2  # each further pipeline would take 2.6 ms
    layout = megatron_layout(
        num_layers=stages + 2,
        pipeline_size=stages,
        num_workers=stages * pipelines,
        num_microbatches=pipelines,
        tied="--untie-embeddings-and-output-weights" not in job.flags,
    )
    nothing = Costs(
        layers=(_NO_COSTS,) * layout.num_layers,
        tied=_NO_COSTS if layout.tied else None,
        message_bytes=0,
        link_latency_s=0,
        link_bytes_per_s=1,
    )
    nodes = dict.fromkeys(layout.workers, 0)
    found = communicators(Needs(with_shadows(layout, None, nodes, job.config.least_holders, nothing)), cell)
    told = f"{found.held}; at the start {found.connected}"
    yield CheckRow(area=AREA, name=f"{known or ''} pipelines of {stages}".strip(), state=OK, found=told)


def _size(job: Job, flag: str, default: int = 1) -> int:
    """Return the value of ``flag`` as a size. Raises ValueError."""
    text = job.value_of(flag)
    return int(_SIZE.read(text)) if text else default


def _ranks(environ: Mapping[str, str]) -> int:
    """Return the number of ranks by what a launcher has set; 0: not known."""
    ranks, tasks, nodes, gpus = map(
        partial(_count, environ), ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE")
    )
    # One task a node is an agent (odyssey run), which starts a rank on each GPU.
    return ranks or (tasks if tasks > nodes else nodes * gpus)


def _count(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(_SIZE.read(environ.get(name, "")))
    except ValueError:
        return 0
