"""What a job must come to, whatever happens to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from odyssey_megatron.errors import JobStopped
from tests.execute.alone import undisturbed
from tests.strict.job import Case, Ended, run


def check(case: Case, seed: int) -> Ended | None:
    """The job ends as one process does, or, with a layer lost, says so: None."""
    try:
        ended = run(case, seed)
    except JobStopped:
        assert len(case.kills) > 1, "one death is survived"
        return None
    lanes = case.cell(0).full_lanes
    alone = undisturbed(case.steps, shards=case.tensor, experts=case.expert, lanes=lanes, tied=case.tied)
    steps = range(case.steps)
    assert [ended.losses[step] for step in steps] == pytest.approx(alone.losses, rel=1e-12)
    if case.evaluates:
        assert [ended.evaluated[1 + step] for step in steps] == pytest.approx(alone.evaluated, rel=1e-12)
    weights, momenta = _alike(ended, "weights"), _alike(ended, "momenta")
    lost = set(alone.weights) - set(weights)
    assert set(weights) <= set(alone.weights)
    assert not lost or _last_holders_died_behind_the_last_step(ended), lost
    for key, weight in weights.items():
        assert torch.allclose(weight, alone.weights[key], rtol=1e-12, atol=1e-14), key
    assert bool(momenta) is bool(case.copies)
    return ended


def _last_holders_died_behind_the_last_step(ended: Ended) -> bool:
    """Of several who died, one that had committed it: its layers may be lost with it, and no loss of the job is."""
    last = ended.case.steps - 1
    behind = any(kill.point == "commit" and kill.step == last for kill, _ in ended.struck)
    return behind and len(ended.struck) > 1


def _alike(ended: Ended, what: str) -> dict[Any, torch.Tensor]:
    """The ``weights`` or ``momenta`` of those who live, which have the same."""
    found: dict[Any, torch.Tensor] = {}
    for rank in ended.alive:
        for key, one in getattr(rank, what).items():
            assert torch.equal(found.setdefault(key, one), one), f"of {what} {key} differs among holders"
    return found
