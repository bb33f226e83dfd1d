"""What one rank exchanges and computes to go on with an interrupted step. The other ranks are not there."""

from __future__ import annotations

import gc
import time
from typing import Any
from unittest import mock

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.execute import interrupted
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.plan.schedule import COMPUTE
from odyssey_megatron.plan.scheduling.smaller import StepPlan


def go_on(plan: StepPlan, cell: Cell) -> tuple[int, float]:
    """Return the bytes that a rank exchanges, and the milliseconds of CPU, until it has the rest of a step.

    It has done half of its own program before, and nobody else anything.

    Args:
        plan: the plan of the step as this rank knows it.
        cell: the rank's.
    """
    progress = Progress(plan.layout.num_microbatches, plan.layout.num_layers, keeps=True)
    computed = [one for one in plan.program if one.op in COMPUTE]
    done, undone = computed[: len(computed) // 2], computed[len(computed) // 2 :]
    for one in done:
        progress.reached(one, one.op)
    exchanged_bytes = []

    def all_reduce(tensor: torch.Tensor, **options: Any) -> None:
        exchanged_bytes.append(tensor.nbytes)

    group: Any = object()
    gc.collect()
    with mock.patch.object(interrupted.dist, "all_reduce", all_reduce):
        began_s = time.thread_time()
        rest = interrupted.go_on(
            group, group, plan, cell, progress, mock.Mock(), torch.device("cpu"), keep=True
        ).program
        taken_ms = 1e3 * (time.thread_time() - began_s)
    assert [one for one in rest or () if one.op in COMPUTE] == undone
    return sum(exchanged_bytes), taken_ms
