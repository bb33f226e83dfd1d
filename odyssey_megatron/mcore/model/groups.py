"""Megatron's process groups, which contain this worker's own cell only.

Odyssey's groups (the world of a generation, the holders of a block) are never given to Megatron: instructions of the
schedule reduce gradients and send messages. Megatron sees one cell: its tensor-, context- and expert-parallel groups
have the cell's ranks, and every other group has this rank alone. Its data-parallel globals fail loudly when they are
used, instead of silently doing nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.plan.placing.groups import cell_group_name, groups_of_cell
from odyssey_megatron.rebuild import world

_FORBIDDEN = (
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
)


class _NoReplicas:
    """In place of a data-parallel group. It is not None, by which Megatron would know that there are no groups at all,
    and then its modules would not find the tensor-parallel one.
    """

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"{name} of Megatron's data-parallel group: replicas change when ranks are lost, so that only Odyssey "
            "does something over them. It reduces gradients and losses itself."
        )


_OURS = "pp ep dp dp_cp expt_dp intra_dp_cp intra_expt_dp intra_dist_opt".split()
_TENSOR = "tp mp expt_tp tp_ep tp_ep_pp tp_dp_cp".split()


class OwnCell:
    """This rank's cell as Megatron's whole world, while ``torch.distributed``'s default group contains all ranks."""

    def __init__(self, cell: Cell, world_size: int, device: str, *, data_parallel: bool = False):
        """``torch.distributed`` must not be initialised yet. ``data_parallel``: see :func:`initialize`."""
        world.stand_alone(cell.tensor_rank, cell.tensor)
        self._following = {
            name: world.group_of_cell(name, ranks, cell.rank, device)
            for name, ranks in groups_of_cell(cell).items()
        }
        self.cell, self.groups = cell, initialize(cell, self._following, data_parallel=data_parallel)
        self.living = world.become_default(cell.rank, world_size, device)

    def follow(self, named: Mapping[str, dist.ProcessGroup]) -> None:
        """From now on Megatron's modules use the cell's groups in ``named``, the groups of a new generation."""
        for name, group in self._following.items():
            group.follow(named[name])


_ALONE = Cell(rank=0)


def initialize(
    cell: Cell = _ALONE, named: Mapping[str, dist.ProcessGroup] | None = None, *, data_parallel: bool = False
) -> ProcessGroupCollection:
    """Initialise ``parallel_state`` on torch's (fake) default group, and return the groups of this rank's cell.

    Whatever else Megatron sums across context-parallel ranks, such as a loss, it sums across data-parallel ranks, too,
    and so Odyssey does it here. The lanes of a cell are not replicas to Megatron either: each lane reads its own
    microbatches.

    Args:
        cell: its tensor-parallel ranks make up the whole default group.
        named: the cell's groups of several ranks, by their names in a generation.
        data_parallel: keep Megatron's data-parallel globals: Megatron-LM's own loop counts with them, and multi-token
            prediction passes them along with what it logs.
    """
    if parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=cell.tensor,
            pipeline_model_parallel_size=1,
            create_gloo_process_groups=False,
        )
        for name in () if data_parallel else _FORBIDDEN:
            setattr(parallel_state, name, _NoReplicas())
        _put_in_place(cell, named or {})
    alone = parallel_state.get_pipeline_model_parallel_group()
    fields: dict[str, Any] = dict.fromkeys(_OURS, alone)
    fields |= dict.fromkeys(_TENSOR, parallel_state.get_tensor_model_parallel_group())
    fields["cp"] = parallel_state.get_context_parallel_group()
    fields["tp_cp"] = parallel_state.get_tensor_and_context_parallel_group()
    fields["ep"] = parallel_state.get_expert_model_parallel_group()
    fields["expt_tp"] = parallel_state.get_expert_tensor_parallel_group()
    fields["tp_ep"] = fields["tp_ep_pp"] = parallel_state.get_expert_tensor_and_model_parallel_group()
    fields["hcp"] = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    return ProcessGroupCollection(embd=None, pos_embd=None, inter_dist_opt=None, **fields)


def _put_in_place(cell: Cell, named: Mapping[str, dist.ProcessGroup]) -> None:
    """Replace the groups that Megatron has made, where they have several ranks, by the cell's."""
    alone = parallel_state.get_pipeline_model_parallel_group()
    state: Any = parallel_state  # its variables are annotated with what they are before they are set

    def group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return named.get(cell_group_name(ranks), alone)

    if cell.tensor > 1:
        for name, made in list(vars(parallel_state).items()):
            if isinstance(made, dist.ProcessGroup) and made.size() == cell.tensor:
                setattr(parallel_state, name, group(cell.tensor_ranks))
    if cell.context > 1:
        state._CONTEXT_PARALLEL_GROUP = context = group(cell.context_ranks)
        state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = [group(one) for one in cell.context_level_ranks]
        state._CONTEXT_PARALLEL_GLOBAL_RANKS = dist.get_process_group_ranks(context)
        state._TENSOR_AND_CONTEXT_PARALLEL_GROUP = group(cell.lane_ranks)
    if cell.expert > 1:
        state._EXPERT_MODEL_PARALLEL_GROUP = experts = group(cell.expert_ranks)
        state._EXPERT_MODEL_PARALLEL_RANKS = dist.get_process_group_ranks(experts)
        state._EXPERT_TENSOR_PARALLEL_GROUP = group(cell.expert_tensor_ranks)
        state._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = group(cell.expert_part_ranks)
        state._EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP = group(cell.expert_part_ranks)
        state._EXPERT_DATA_PARALLEL_GROUP = alone


def renew_buffers() -> None:
    """Give Megatron new shared buffers: operations of a generation that has ended may still write to the old ones for a
    moment.
    """
    parallel_state.destroy_global_memory_buffer()
    parallel_state._set_global_memory_buffer()


def place(*, first: bool, last: bool) -> tuple[int, int]:
    """The stage, and the number of stages, that a chunk reports if it is the first, the last, both or neither."""
    return (0, 1 + (not last)) if first else (1, 2 + (not last))


@contextlib.contextmanager
def in_stage(stage: int, num_stages: int) -> Iterator[None]:
    """In the body Megatron believes that it is in this stage; user code reads data, and seeds, by that."""
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(num_stages)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)
