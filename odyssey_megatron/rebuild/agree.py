"""The survivors' agreement on where the interrupted step stands (I5).

A rank enters a step's agreement (one all-reduce over all members) only when all its gradients are reduced.
So if anyone came out of it, everyone had entered it, holds complete gradients, and can finish the step
alone with the totals that the one who came out has. If nobody came out, everyone does the step again.
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

    committed: int
    """Steps committed so far = the step being worked on."""
    reduced: bool
    """All gradients of the step being worked on are reduced on this rank."""


class AgreementBroken(OdysseyError):
    """The standings contradict I5: a bug. The job must stop rather than train on."""


def step_to_finish(standings: Sequence[Standing]) -> int | None:
    """The step that some have committed and the rest must finish with the totals of those, or None.

    Raises:
        AgreementBroken
    """
    ahead = max(one.committed for one in standings)
    behind = min(one.committed for one in standings)
    if ahead == behind:
        return None
    stuck = [one for one in standings if one.committed == behind and not one.reduced]
    if ahead > behind + 1 or stuck:
        raise AgreementBroken(
            f"survivors stand at steps {sorted({s.committed for s in standings})}, {len(stuck)} of those behind "
            "without reduced gradients. This must not happen; please report it with the journal."
        )
    return behind


def exchange(
    group: dist.ProcessGroup, standing: Standing, fingerprint: int, totals: torch.Tensor
) -> tuple[list[Standing], list[torch.Tensor]]:
    """All members' standings and the totals of their last agreed step.

    Args:
        fingerprint: of (generation, plan hash); must be the same everywhere.
        totals: 1-D float64; the totals of step ``committed - 1``.

    Raises:
        AgreementBroken: a member carries out another plan.
    """
    mine = torch.cat(
        [torch.tensor([fingerprint, standing.committed, standing.reduced], dtype=torch.float64), totals.cpu()]
    )
    size = dist.get_world_size(group)
    everyone = [torch.empty_like(mine) for _ in range(size)]
    device = totals.device
    received = [one.to(device) for one in everyone]
    dist.all_gather(received, mine.to(device), group=group)
    everyone = [one.cpu() for one in received]
    if any(int(one[0]) != fingerprint for one in everyone):
        raise AgreementBroken("the members do not carry out the same plan of the same generation")
    standings = [Standing(committed=int(one[1]), reduced=bool(one[2])) for one in everyone]
    return standings, [one[3:].to(device) for one in everyone]
