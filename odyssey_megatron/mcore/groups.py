"""Megatron's process groups: this worker's own cell only.

Odyssey's groups (the world of a generation, the holders of a block) are never given to Megatron: gradients are reduced
and messages sent by instructions of the schedule. Megatron sees a cell of tensor-parallel size 1 whose every group has
this rank alone, and its data-parallel globals are taken away, so that a collective that would silently do nothing on
them fails loudly in their place.
"""

from __future__ import annotations

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


def initialize() -> ProcessGroupCollection:
    """Initialises ``parallel_state`` on torch's (fake, fixed) default group; returns this cell's groups."""
    if parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, create_gloo_process_groups=False
        )
        for name in _FORBIDDEN:
            setattr(parallel_state, name, None)
    alone = parallel_state.get_tensor_model_parallel_group()
    fields: dict[str, Any] = dict.fromkeys(_OURS, alone)
    return ProcessGroupCollection(embd=None, pos_embd=None, hcp=None, inter_dist_opt=None, **fields)
