"""Megatron's process groups: this worker's own cell only.

Odyssey's groups (the world of a generation, the holders of a block) are never given to Megatron: gradients are reduced
and messages sent by instructions of the schedule. Megatron sees a cell of tensor-parallel size 1 whose every group has
this rank alone, and its data-parallel globals are taken away, so that a collective that would silently do nothing on
them fails loudly in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

_FORBIDDEN = (
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
)
_OURS = (
    "tp pp mp cp tp_cp ep expt_tp tp_ep tp_ep_pp tp_dp_cp dp dp_cp expt_dp intra_dp_cp intra_expt_dp intra_dist_opt"
).split()


def initialize(*, data_parallel: bool = False) -> ProcessGroupCollection:
    """Initialises ``parallel_state`` on torch's (fake) default group; returns this cell's groups.

    Args:
        data_parallel: keep Megatron's data-parallel globals: Megatron-LM's own loop counts with them.
    """
    if parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, create_gloo_process_groups=False
        )
        for name in () if data_parallel else _FORBIDDEN:
            setattr(parallel_state, name, None)
    alone = parallel_state.get_tensor_model_parallel_group()
    fields: dict[str, Any] = dict.fromkeys(_OURS, alone)
    return ProcessGroupCollection(embd=None, pos_embd=None, hcp=None, inter_dist_opt=None, **fields)


def place(*, first: bool, last: bool) -> tuple[int, int]:
    """The stage, and the number of stages, of a chunk that is the first, the last, both or neither."""
    return (0, 1 + (not last)) if first else (1, 2 + (not last))


@contextlib.contextmanager
def in_stage(stage: int, num_stages: int) -> Iterator[None]:
    """In the body Megatron believes to be in this stage: user code reads data, or seeds, by that."""
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(num_stages)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)
