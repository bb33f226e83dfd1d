"""What drawn jobs with smaller cells have in common: who else dies, and what must have become of the job."""

from __future__ import annotations

import random
from collections.abc import Sequence

from odyssey_megatron.errors import EXIT_LAYERS_LOST
from odyssey_megatron.faults import RECOVERY_POINTS
from odyssey_megatron.metrics.steps import CommittedStep
from tests.e2e.jobs import TOLERANCE, Outcome, assert_equal_numbers, assert_holders_agree

IN_A_STEP = ("forward", "backward", "weight_grad", "reduce", "agreement", "optimizer", "commit")


def another(
    rng: random.Random, *, size: int, workers: int, first: int, steps: int, points: Sequence[str] = IN_A_STEP
) -> str:
    """One more rank that dies, when worker ``first`` is a smaller cell of ``size``, or nearly so: of it, or of others.

    ``points``: those of a step at which it may die; ``steps``: how many the job makes.
    """
    is_own = rng.random() < 0.5
    worker = first if is_own else rng.choice([one for one in range(workers) if one != first])
    # The first ones are in a smaller cell.
    rank = worker * size + rng.randrange(size // 2 if is_own else size)
    incarnation = rng.choice((1, 2, 2, 2, 2)) if is_own else 0
    where, step = "", -1
    if rng.random() < 0.4:
        point = rng.choice(RECOVERY_POINTS)
        where = "" if is_own else f",generation={rng.randrange(3, 8)}"
    else:
        point = rng.choice(points)
        step = step if is_own else rng.randrange(6, steps - 8)
    found = f"rank={rank},step={step},at={point},incarnation={incarnation}{where}"
    if rng.random() < 0.4:
        found += f";rank={rank},step=-1,at=groups,incarnation={incarnation + 1}"
    return found


def assert_exact_or_lost(shot: Outcome, theirs: list[CommittedStep], case: object) -> bool:
    """The numbers of the job are ``theirs``, and its holders agree; or it says what it has lost, and its numbers until
    then are theirs. Returns whether it came to its end.
    """
    ours = shot.run.steps
    assert "Traceback" not in shot.log, f"{case}\n{shot.log[-4000:]}"
    if shot.exit_code == EXIT_LAYERS_LOST:
        assert "is left of" in shot.log or "no rank is left" in shot.log, f"{case}\n{shot.log[-4000:]}"
        if ours:
            assert_equal_numbers(ours, theirs[: len(ours)], rel=TOLERANCE)
        return False
    assert shot.exit_code == 0, f"{case}\n{shot.log[-4000:]}"
    assert_equal_numbers(ours, theirs, rel=TOLERANCE)
    assert_holders_agree(shot)
    return True
