"""The survivors' agreement on where the interrupted step stands (I5).

A rank enters a step's agreement (one all-reduce over all members) only when all its gradients are reduced.
So if anyone came out of it, everyone had entered it, holds complete gradients, and can finish the step
alone with the totals that the one who came out has. If nobody came out, everyone goes on with the step where it can
(``plan/resume.py``), and else does it again.
Other work that all ranks do together (an evaluation, a checkpoint) stands in the same sequence and ends in the same
way: whoever enters the barrier at its end has done its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.state import Cell
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.resume import fits, resume
from odyssey_megatron.plan.schedule import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a rank is."""

    done: int
    """Pieces of common work done so far: steps, evaluations, checkpoints."""
    ready: bool
    """This rank's part of the one at hand is complete; of a step: all its gradients are reduced."""
    resumable: bool = False
    """A step, and this rank can go on where it is: see ``plan/resume.py``."""


class AgreementBroken(OdysseyError):
    """The standings contradict I5: a bug. The job must stop rather than train on."""


def left_behind(standings: Sequence[Standing]) -> bool:
    """Whether some have done a piece of work that the others must finish by themselves.

    Raises:
        AgreementBroken
    """
    ahead = max(one.done for one in standings)
    behind = min(one.done for one in standings)
    if ahead == behind:
        return False
    stuck = [one for one in standings if one.done == behind and not one.ready]
    if ahead > behind + 1 or stuck:
        raise AgreementBroken(
            f"survivors have done {sorted({s.done for s in standings})} pieces of work, {len(stuck)} of those behind "
            "without their part of the next. This must not happen; please report it with the journal."
        )
    return True


def exchange(
    group: dist.ProcessGroup, standing: Standing, fingerprint: int, totals: torch.Tensor
) -> tuple[list[Standing], list[torch.Tensor]]:
    """All members' standings and the totals of their last agreed step.

    Args:
        fingerprint: of (generation, plan hash); must be the same everywhere.
        totals: 1-D float64; of the last agreed step.

    Raises:
        AgreementBroken: a member carries out another plan.
    """
    mine = torch.cat(
        [
            torch.tensor(
                [fingerprint, standing.done, standing.ready, standing.resumable], dtype=torch.float64
            ),
            totals.cpu(),
        ]
    )
    size = dist.get_world_size(group)
    everyone = [torch.empty_like(mine) for _ in range(size)]
    device = totals.device
    received = [one.to(device) for one in everyone]
    dist.all_gather(received, mine.to(device), group=group)
    everyone = [one.cpu() for one in received]
    if any(int(one[0]) != fingerprint for one in everyone):
        raise AgreementBroken("the members do not carry out the same plan of the same generation")
    standings = [Standing(done=int(one[1]), ready=bool(one[2]), resumable=bool(one[3])) for one in everyone]
    return standings, [one[4:].to(device) for one in everyone]


def can_resume(
    cell_group: dist.ProcessGroup | None,
    layout: Layout,
    worker: int,
    progress: Progress,
    device: torch.device,
) -> bool:
    """Whether what ``worker`` has done of the interrupted step, if anything, can stay under the new ``layout``.

    Collective over its cell, whose ranks must be equally far; no group is a cell of one.
    """
    alike = True
    if cell_group is not None:
        both = torch.stack([progress.table.int(), -progress.table.int()]).to(device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=cell_group)
        alike = torch.equal(both[0], -both[1])
    return alike and progress.whole and fits(layout, worker, progress.table.tolist())


def what_is_left(
    group: dist.ProcessGroup, plan: Plan, cell: Cell, progress: Progress, device: torch.device
) -> Program | None:
    """The program of the rest of the step for this rank's worker; None if all must do the step again. Collective."""
    total = progress.table.int().to(device)
    dist.all_reduce(total, group=group)
    table = (total // cell.size).tolist()
    schedule = resume(plan.layout, plan.schedule, table) if total.any() else None
    if schedule is None:
        return None
    return schedule.program(cell.worker) if cell.worker in plan.layout.workers else ()
