"""How the survivors go on with a step that a failure has interrupted, once they know where they stand.

What each worker has done of the step stays, where the new plan lets it (``plan/scheduling/resume.py``). The survivors
sum a table of that, and each works out the rest of its own program from the sum. Where that cannot be, all do
the step again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.execute.interpreter import Compute
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import Program
from odyssey_megatron.plan.scheduling.resume import fits, rest, usable
from odyssey_megatron.plan.scheduling.smaller import StepPlan


class Rest(NamedTuple):
    """What the survivors make of an interrupted step. It is the same on all of them, but for the program."""

    begun: bool
    """Whether anybody had begun the step."""
    program: Program | None = None
    """What is left of the step for this rank's worker; None: the step begins anew."""
    taken_up: int = 0
    """The number of eager forwards that all workers together go on with."""


def go_on(
    group: dist.ProcessGroup,
    cell_group: dist.ProcessGroup | None,
    plan: StepPlan,
    cell: Cell,
    progress: Progress,
    compute: Compute,
    device: torch.device,
    *,
    keep: bool,
) -> Rest:
    """Decide how all ranks go on with the interrupted step; all of them have finished what came before it.

    Collective over ``group``, which has all members, and over ``cell_group``, which has the ranks of this
    cell; None if this rank is alone in it.

    Args:
        plan: The new generation's plan of the step, for this rank's worker.
        progress: What this rank has done of the step.
        keep: Whether that may stay.
    """
    resumable = keep and can_resume(cell_group, plan.layout, cell.worker, progress, device)
    flags = torch.tensor([progress.table.any(), not resumable], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    begun, stuck = flags.tolist()
    if not begun or stuck:
        return Rest(bool(begun))
    progress.bring_back()
    return Rest(True, *what_is_left(group, cell_group, plan, cell, progress, compute, device))


def can_resume(
    cell_group: dist.ProcessGroup | None,
    layout: Layout,
    worker: int,
    progress: Progress,
    device: torch.device,
) -> bool:
    """Return whether what ``worker`` has done of the interrupted step can stay under the new ``layout``.

    Collective over the ranks of its cell, which must be equally far. Without a group the cell has one rank.
    """
    alike = True
    if cell_group is not None:
        both = torch.stack([progress.table.int(), -progress.table.int()]).to(device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=cell_group)
        alike = torch.equal(both[0], -both[1])
    return alike and progress.whole and fits(layout, worker, progress.table.tolist())


def what_is_left(
    group: dist.ProcessGroup,
    cell_group: dist.ProcessGroup | None,
    plan: StepPlan,
    cell: Cell,
    progress: Progress,
    compute: Compute,
    device: torch.device,
) -> tuple[Program | None, int]:
    """Return the rest of the step's program for this rank's worker; None if all must do the step again.

    Collective. The second value is the number of eager forwards that all workers together go on with.
    """
    taken_up = take_up(cell_group, plan.layout, cell.worker, progress, compute, device)
    counted = torch.tensor([taken_up], dtype=torch.int32)
    total = torch.cat([progress.table.int().flatten(), counted]) * cell.places
    dist.all_reduce(total, group=group)
    *flat, taken_up = (total // cell.full).tolist()
    width = plan.layout.num_layers
    table = [flat[at : at + width] for at in range(0, len(flat), width)]
    cuts = {block.first for block in plan.layout.blocks()}
    left = rest(plan.program, table, cuts) if any(flat) else None
    stuck = torch.tensor([left is None], dtype=torch.int32)
    dist.all_reduce(stuck, op=dist.ReduceOp.MAX, group=group)
    return (None, 0) if stuck.item() else (left, taken_up)


def take_up(
    cell_group: dist.ProcessGroup | None,
    layout: Layout,
    worker: int,
    progress: Progress,
    compute: Compute,
    device: torch.device,
) -> int:
    """Make the eager forwards of ``worker`` its own where the new layout does; return how many it does.

    Collective over its cell: an eager forward that one of its ranks has not finished is dropped on all.
    """
    visits = usable(layout, worker, progress.table.tolist(), progress.ahead)
    if cell_group is not None:
        mine = torch.zeros_like(progress.table).to(device)
        for microbatch, first, _ in visits:
            mine[microbatch, first] = 1
        dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=cell_group)
        visits = [visit for visit in visits if mine[visit[0], visit[1]]]
    progress.take_up(visits)
    compute.adopt(visits)
    return len(visits)
