"""The survivors' agreement on where the interrupted step stands (I5).

A rank enters a step's agreement (one all-reduce over all members) only when all its gradients are reduced. So if any
rank completed it, all ranks had entered it and hold complete gradients, and each can finish the step alone with the
totals that the other rank has. If no rank completed it, all go on with the step where they can
(``execute/interrupted.py``), and otherwise do it again.

Other work that all ranks do together (an evaluation, a checkpoint) is counted in the same sequence and ends in the
same way: a rank that enters the barrier at its end has done its part.
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
    """How far a rank has come."""

    done: int
    """Number of pieces of common work done so far: steps, evaluations, checkpoints."""
    ready: bool
    """Whether this rank's part of the current piece is complete. In a step: all its gradients are reduced."""
    committed: int = 0
    """Number of steps committed so far."""
    joins: bool = False
    """Whether this rank has just joined, so that the others tell it how far the job is."""


class AgreementBroken(OdysseyError):
    """The standings contradict I5, which is a bug. The job must stop rather than train on."""


def furthest(standings: Sequence[Standing]) -> Standing:
    """Return the standing with the most work done, not counting ranks that join: there a joining rank starts."""
    return max((one for one in standings if not one.joins), key=lambda one: one.done)


def left_behind(standings: Sequence[Standing]) -> bool:
    """Whether some ranks have done a piece of work that the others must finish by themselves.

    Raises:
        AgreementBroken: ranks are more than one piece apart, or a rank behind is not ready.
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
    """Exchange ``standing`` with all members of ``group``, and return all standings by rank in the group. Collective.

    Args:
        fingerprint: a number made from (generation, plan hash); must be the same on all members.

    Raises:
        AgreementBroken: A member carries out another plan.
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
    """Return what the rank that is furthest knows: the totals of the last agreed step, and what a joining rank needs.

    Collective. ``known`` is this rank's own knowledge, 1-D, of the same length on all ranks. With experts it is long,
    so it is only sent if some rank is behind or joins.
    """
    ahead = furthest(standings)
    if any(one.joins or one.done < ahead.done for one in standings):
        known = known.clone()
        dist.broadcast(known, group=group, group_src=standings.index(ahead))
    return known
