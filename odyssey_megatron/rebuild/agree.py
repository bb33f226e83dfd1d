"""The survivors' agreement on where the interrupted step stands (I5).

A rank enters a step's agreement (one all-reduce over all members) only when all its gradients are reduced. So if any
rank came out of it, every rank had entered it and holds complete gradients. Each can then finish the step alone, with
the totals from the rank that came out. If no rank came out, the interrupted step is continued where that is possible
(``execute/interrupted.py``), and otherwise done again.

Other work that all ranks do together (an evaluation, a checkpoint) stands in the same sequence and ends in the same
way: a rank that enters the barrier at its end has done its part.
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
    """How far one rank has come in the job's sequence of common work."""

    done: int
    """Number of pieces of common work done so far: steps, evaluations, checkpoints."""
    ready: bool
    """Whether this rank's part of the current piece is complete. For a step: all its gradients are reduced."""
    committed: int = 0
    """Number of steps committed so far."""
    joins: bool = False
    """Whether the rank has just joined. It then learns from the others how far the job has come."""


class AgreementBroken(OdysseyError):
    """The standings contradict I5, which is a bug. The job must stop rather than train on."""


def furthest(standings: Sequence[Standing]) -> Standing:
    """Return the standing with the most work done among ranks that do not join: where a rank that joins starts."""
    return max((one for one in standings if not one.joins), key=lambda one: one.done)


def left_behind(standings: Sequence[Standing]) -> bool:
    """Return whether some ranks have done a piece of work that the others must still finish by themselves.

    Raises:
        AgreementBroken: Ranks are more than one piece apart, or one that is behind is not ready.
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
    """Return the standings of all members, in the order of their ranks in ``group``. Collective.

    Args:
        fingerprint: A number made from (generation, plan hash). It must be the same on all members.

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
    """Return what the rank that is furthest knows: the last agreed step's totals, and what else a joining rank needs.

    Collective over ``group``. ``known`` is this rank's own version, a 1-D tensor of the same length on all ranks. With
    experts it is long, so it is sent only if some rank joins or is behind.
    """
    ahead = furthest(standings)
    if any(one.joins or one.done < ahead.done for one in standings):
        known = known.clone()
        dist.broadcast(known, group=group, group_src=standings.index(ahead))
    return known
