"""How the survivors go on with a step that a failure has interrupted, once they know where they stand.

What each worker has done of the step stays, where the new plan lets it (``plan/scheduling/resume.py``). The survivors
tell each other which messages have been computed and which have been used, in two bits each, and each works out the
rest of its own program from that. Where that cannot be, all do the step again.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.execute.interpreter import Compute
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import Program
from odyssey_megatron.plan.scheduling.resume import Levels, cuts_of, fits, levels_at, rest, runs_apart, usable
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
    resumable = keep and can_resume(cell_group, plan, cell.worker, progress, device)
    flags = torch.tensor([progress.table.any(), not resumable], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    begun, stuck = flags.tolist()
    if not begun or stuck:
        return Rest(bool(begun))
    progress.bring_back()
    own = take_up(cell_group, plan.layout, cell.worker, progress, compute, device)
    levels, taken_up = tell(group, plan.layout, cell, progress, own)
    return Rest(True, rest(plan.program, progress.rows(), levels), taken_up)


def can_resume(
    cell_group: dist.ProcessGroup | None,
    plan: StepPlan,
    worker: int,
    progress: Progress,
    device: torch.device,
) -> bool:
    """Return whether what ``worker`` has done of the interrupted step can stay under the new ``plan``.

    Collective over the ranks of its cell, which must be equally far. Without a group the cell has one rank.
    """
    alike = True
    if cell_group is not None:
        digest = hashlib.sha256(progress.table.numpy().tobytes()).digest()
        number = int.from_bytes(digest[:7])  # a whole table is hundreds of KB in a large job
        both = torch.tensor([number, -number]).to(device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=cell_group)
        alike = torch.equal(both[0], -both[1])
    rows = progress.rows()
    return (
        alike
        and progress.whole
        and progress.keeps
        and fits(plan.layout, worker, rows)
        and not runs_apart(plan.program, rows, cuts_of(plan.layout))
    )


def tell(
    group: dist.ProcessGroup, layout: Layout, cell: Cell, progress: Progress, taken_up: int
) -> tuple[Levels, int]:
    """Return how far all workers are at the cuts between blocks, and the sum of their ``taken_up``.

    Collective over ``group``. The first rank of each cell speaks for it.
    """
    cuts = cuts_of(layout)
    words = torch.from_numpy(levels_at(cuts, progress.table.numpy()))
    total = torch.cat([words, torch.tensor([taken_up], dtype=torch.int32)]) * (cell.index == 0)
    dist.all_reduce(total, group=group)
    return Levels(cuts, total[:-1].numpy()), int(total[-1])


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
    visits = usable(layout, worker, progress.rows(), progress.ahead)
    if cell_group is not None:
        routed = [microbatch for route in layout.routes for microbatch in route.microbatches]
        numbers = {microbatch: number for number, microbatch in enumerate(routed)}
        mine = torch.zeros(len(routed), layout.num_layers, dtype=torch.uint8, device=device)
        for microbatch, first, _ in visits:
            mine[numbers[microbatch], first] = 1
        dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=cell_group)
        visits = [visit for visit in visits if mine[numbers[visit[0]], visit[1]]]
    progress.take_up(visits)
    compute.adopt(visits)
    return len(visits)
