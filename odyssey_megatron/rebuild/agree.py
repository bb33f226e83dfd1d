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
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.execute.interpreter import Compute
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.resume import fits, rest, usable
from odyssey_megatron.plan.schedule import Program
from odyssey_megatron.plan.smaller import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a rank is."""

    done: int
    """Pieces of common work done so far: steps, evaluations, checkpoints."""
    ready: bool
    """This rank's part of the one at hand is complete; of a step: all its gradients are reduced."""
    committed: int = 0
    """Steps committed so far."""
    joins: bool = False
    """It has just joined, and takes over from the others how far the job is."""


class AgreementBroken(OdysseyError):
    """The standings contradict I5: a bug. The job must stop rather than train on."""


def furthest(standings: Sequence[Standing]) -> Standing:
    """Of those that have been there, who has done most: where a rank that joins starts."""
    return max((one for one in standings if not one.joins), key=lambda one: one.done)


def left_behind(standings: Sequence[Standing]) -> bool:
    """Whether some have done a piece of work that the others must finish by themselves.

    Raises:
        AgreementBroken
    """
    standings = [one for one in standings if not one.joins]
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


def exchange(group: dist.ProcessGroup, standing: Standing, fingerprint: int) -> list[Standing]:
    """All members' standings.

    Args:
        fingerprint: of (generation, plan hash); must be the same everywhere.

    Raises:
        AgreementBroken: a member carries out another plan.
    """
    mine = torch.tensor([fingerprint, *astuple(standing)], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    rows = [one.tolist() for one in everyone]
    if any(int(row[0]) != fingerprint for row in rows):
        raise AgreementBroken("the members do not carry out the same plan of the same generation")
    standings = []
    for row in rows:
        values: dict[str, Any] = {
            at.name: int(value) if at.type == "int" else bool(value)
            for at, value in zip(fields(Standing), row[1:], strict=True)
        }
        standings.append(Standing(**values))
    return standings


def told(group: dist.ProcessGroup, standings: Sequence[Standing], known: torch.Tensor) -> torch.Tensor:
    """What those who are furthest know: the totals of the last agreed step, and what a rank that joins must know
    besides. Collective; ``known`` is this rank's, 1-D, as long as everyone's. With experts that is long, so that it is
    sent only where somebody needs it.
    """
    ahead = furthest(standings)
    if any(one.joins or one.done < ahead.done for one in standings):
        known = known.clone()
        dist.broadcast(known, group=group, group_src=standings.index(ahead))
    return known


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
) -> tuple[bool, Program | None, int]:
    """Where all are through with what came before the interrupted step: how they go on with it. Collective.

    Args:
        keep: what has been done of it may stay.

    Returns:
        Whether anybody has begun it; and what :func:`what_is_left` says, if it goes on where it was.
    """
    resumable = keep and can_resume(cell_group, plan.layout, cell.worker, progress, device)
    flags = torch.tensor([progress.table.any(), not resumable], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    begun, stuck = flags.tolist()
    if not begun or stuck:
        return bool(begun), None, 0
    progress.bring_back()
    return True, *what_is_left(group, cell_group, plan, cell, progress, compute, device)


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
    group: dist.ProcessGroup,
    cell_group: dist.ProcessGroup | None,
    plan: StepPlan,
    cell: Cell,
    progress: Progress,
    compute: Compute,
    device: torch.device,
) -> tuple[Program | None, int]:
    """The program of the rest of the step for this rank's worker; None if all must do the step again. Collective.

    And of how many microbatches' visits it goes on with forwards that had been run ahead, everywhere.
    """
    taken_up = take_up(cell_group, plan.layout, cell.worker, progress, compute, device)
    counted = torch.tensor([taken_up], dtype=torch.int32)
    total = torch.cat([progress.table.int().flatten(), counted]) * cell.each
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
    """Makes the forwards that ``worker`` has run ahead its own, where the new layout does; returns how many those are.

    Collective over its cell: what a rank of it was not through with is nobody's.
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
