"""The survivors' agreement on where the interrupted step stands (I5).

A rank enters a step's agreement (one all-reduce over all members) only when all its gradients are reduced.
So if anyone came out of it, everyone had entered it, holds complete gradients, and can finish the step
alone with the totals that the one who came out has. If nobody came out, everyone goes on with the step where it can
(``execute/interrupted.py``), and else does it again.
Other work that all ranks do together (an evaluation, a checkpoint) stands in the same sequence and ends in the same
way: whoever enters the barrier at its end has done its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.errors import OdysseyError


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
