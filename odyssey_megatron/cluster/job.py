"""``JobSpec``: what the coordinator must know of a job in order to plan for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import ConfigError


def largest_cell(sizes: Iterable[int], ranks: int) -> int:
    """Return the largest of ``sizes`` (``JobSpec.cell_sizes``) for which ``ranks`` ranks suffice; 0: for none."""
    return max((one for one in sizes if one <= ranks), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The shape of one training job. Its ranks post it at start, and it is equal on all of them.

    "Layers" are numbered as the planner sees them: 0 is the embedding, 1..n the transformer layers,
    n+1 the head (final norm, output layer, loss). ``num_layers`` counts all n+2.
    """

    num_layers: int
    pipeline_model_parallel_size: int
    tensor_model_parallel_size: int
    num_microbatches: int
    """Number of microbatches in a global batch, over all pipelines. If cells have lanes, one microbatch here stands for
    one of Megatron's for each lane."""
    tokens_per_step: int
    train_steps: int
    optimizer_copies: int = 0
    """Number of holders that keep each part of a layer's optimizer state; 0: all of them."""
    least_holders: int = 0
    """The least number of holders of each layer, some of them shadows if need be; 0: as many as parallelism gives."""
    eager_forwards: bool = False
    """Whether holders run forwards ahead for the workers whose place they would take."""
    slower_for_memory: float = 0.0
    """The share of its step's time by which a plan may be slower if it needs less memory."""
    is_tied: bool = False
    """Whether embedding and head share a weight."""
    stage_layers: tuple[int, ...] = ()
    """Number of transformer layers in each stage of the failure-free plan; empty: as even as can be."""
    best_layout: bool = False
    """Whether the failure-free plan is the best for the profile, and not the one of the parallel sizes."""
    spreads_replicas: bool = False
    """Whether the failure-free plan puts the replicas of a layer on different nodes, where that can be."""
    virtual_stages: int = 1
    """Number of virtual stages in each stage; with more than one, routes of the failure-free plan may visit workers
    more than once."""
    revisits: bool = True
    """Whether routes may visit a worker more than once."""
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    whole_cells_only: str = ""
    """The reason why a cell that has lost ranks does not go on with fewer; empty: it may."""
    num_experts: int = 0
    """Number of experts of a layer that has any; 0: none has."""
    experts_work: float = 0.0
    """Share of the model's work that is done by experts spread over ranks, by an estimate."""
    whole_shards_only: str = ""
    """The reason why it does not go on with fewer tensor-parallel ranks; empty: it may."""
    even_gangs_only: str = ""
    """The reason why a gang goes on only with as many ranks as divide a whole one; empty: it may with others."""
    aside_bytes: int | None = None
    """GPU memory beside what plans may use, of which NCCL's communicators may fill all; None: no NCCL connects the
    ranks, or the memory is not known."""
    packs_sequences: bool = False
    """Whether a microbatch is packed sequences, of which long ones take more time than short ones."""
    save_steps: int | None = None
    """Number of steps between two checkpoints; 0: the job saves none; None: not known."""

    @property
    def chooses_layout(self) -> bool:
        """Whether the failure-free plan may have another layout than the launch line's stages in a row."""
        return self.best_layout or (self.revisits and self.virtual_stages > 1)

    def cell(self, rank: int) -> Cell:
        """Return the cell of ``rank``, which is whole."""
        return Cell.in_job(rank, self)

    @property
    def cell_size(self) -> int:
        """Number of ranks of a whole cell."""
        return self.cell(0).size

    @property
    def cell_sizes(self) -> tuple[int, ...]:
        """The numbers of ranks that a cell may have, descending: the whole one's first."""
        if self.whole_cells_only:
            return (self.cell_size,)
        cell = self.cell(0)
        found = [self.cell_size // each for each in cell.divisions(tensor=not self.whole_shards_only)]
        found += () if self.even_gangs_only else cell.uneven_sizes
        return tuple(sorted(found, reverse=True))

    @property
    def experts_of_one(self) -> int:
        """Number of experts of a layer that each rank of a whole gang has; 0 without gangs."""
        size = self.expert_model_parallel_size
        return self.num_experts // size if size > 1 else 0

    @property
    def stretches(self) -> tuple[int, int]:
        """Number of ranks of a whole cell that share out the optimizer state of what they have alike; and of experts
        that are spread over ranks. (1, 1) where all holders keep all of it.
        """
        parts = self.cell(0).parts
        is_gang = self.expert_model_parallel_size > 1
        return (parts.alike, parts.experts_alike if is_gang else 1) if self.optimizer_copies else (1, 1)

    @property
    def alike_ranks(self) -> int:
        """Number of ranks of a cell that have the same of all layers, and come first in :meth:`Cell.divisions`.

        It is 1 with expert parallelism: then experts are spread over these ranks. Weights besides experts, which are
        the same, are counted in a smaller gang as if they were experts, too.
        """
        return self.context_parallel_size if self.expert_model_parallel_size == 1 else 1

    @property
    def cells(self) -> dict[str, Any]:
        """The arguments of ``cluster.state.initial_state`` that say what the job's cells are."""
        return {
            "cell_size": self.cell_size,
            "context": self.alike_ranks,
            "shares_out": self.stretches[0] > 1,
            "experts": self.experts_of_one,
            "experts_work": self.experts_work,
        }

    def check(self, world_size: int) -> None:
        """Raise ConfigError if ``world_size`` ranks cannot form the initial layout."""
        pp, size = self.pipeline_model_parallel_size, self.cell_size
        check_world(world_size, pp, self.cell(0))
        blocks = self.num_layers - 2
        if pp > blocks:
            raise ConfigError(
                f"--pipeline-model-parallel-size {pp} exceeds --num-layers {blocks}: each stage "
                f"needs at least one transformer layer. Use at most {blocks} stages."
            )
        dp = world_size // (pp * size)
        if self.num_microbatches < dp:
            lanes = self.cell(0).lanes
            each = f", each of {lanes} at a time," if lanes > 1 else ""
            raise ConfigError(
                f"{self.num_microbatches * lanes} microbatch(es) per global batch cannot feed {dp} "
                f"pipelines{each} ({world_size} ranks / {pp} stages). Raise --global-batch-size, lower "
                "--micro-batch-size, or start fewer ranks."
            )
        workers = world_size // size
        if self.least_holders > max(2, workers):  # only with a redundancy level above 1
            raise ConfigError(
                f"--odyssey-redundancy-level {self.least_holders - 1} is to have {self.least_holders} holders of each "
                f"layer, and the job has {workers} worker(s) of {size} rank(s). Use at most {max(1, workers - 1)}, or "
                "start more ranks."
            )


def check_world(world_size: int, pp: int, cell: Cell) -> None:
    """Raise ConfigError if ``world_size`` ranks do not make whole pipelines of ``pp`` workers like ``cell``."""
    if pp >= 1 and cell.size >= 1 and world_size % (pp * cell.size) == 0:
        return
    sizes = {"tensor-model": cell.tensor, "context": cell.context} if cell.size >= 1 else {}
    times = "".join(f" times --{name}-parallel-size {one}" for name, one in sizes.items() if one > 1)
    if cell.lanes > 1:
        times += f" times {cell.lanes} replicas that share out experts (--expert-model-parallel-size {cell.expert})"
    raise ConfigError(
        f"the world size ({world_size} ranks) is not divisible by "
        f"--pipeline-model-parallel-size {pp}{times}. Start a multiple of {max(pp, 1) * max(cell.size, 1)} ranks "
        "(--nproc-per-node times --nnodes) or change the sizes."
    )
