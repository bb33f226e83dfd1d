"""The survivors' agreement on where the interrupted step stands (I5).

A rank enters a step's agreement (one all-reduce over all members) only when all its gradients are reduced.
So if anyone came out of it, everyone had entered it, holds complete gradients, and can finish the step
alone with the totals that the one who came out has. If nobody came out, everyone does the step again.
Other work that all ranks do together (an evaluation, a checkpoint) stands in the same sequence and ends in the same
way: whoever enters the barrier at its end has done its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
                [fingerprint, standing.done, standing.ready, standing.committed, standing.joins],
                dtype=torch.float64,
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
    standings = [
        Standing(done=int(one[1]), ready=bool(one[2]), committed=int(one[3]), joins=bool(one[4]))
        for one in everyone
    ]
    return standings, [one[5:].to(device) for one in everyone]
