"""Cells that are smaller already, and whoever dies beside them, at points that a seed draws: the numbers are those of a
run without a failure, or the job says what it has lost.

    ODYSSEY_SEEDS=0:20 bash tests/run.sh tests/e2e/test_drawn_shapes.py -m matrix      # others than the suite's
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

from tests.e2e.drawn import IN_A_STEP, another, assert_exact_or_lost
from tests.e2e.jobs import assert_equal_weights
from tests.e2e.test_shrinking import BOTH, CONTEXT, CONTEXTS, GANG, GANGS, SEQUENCE, SMALL_GANG, lost

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(500)]

SHAPES = {
    # what the job is, ranks of a worker, stages, workers
    "gangs": (GANGS, 4, 1, 2),
    "three-gangs": (GANGS, 4, 1, 3),
    "two-small-gangs": (SMALL_GANG, 2, 1, 2),
    "three-small-gangs": (SMALL_GANG, 2, 1, 3),
    "one-pipeline-of-gangs": (GANG, 2, 2, 2),
    "two-pipelines-of-gangs": (GANG, 2, 2, 4),
    "context": (CONTEXT, 2, 1, 3),
    "contexts": (CONTEXTS, 4, 1, 2),
    "sequence": (SEQUENCE, 2, 2, 4),
    "both": (BOTH, 4, 1, 2),
}
STATES = ("", "--use-distributed-optimizer")
POLICIES = ("reroute", "reroute", "reroute", "auto", "replan")
STEPS = 40
FIRST, LAST = (int(one) for one in os.environ.get("ODYSSEY_SEEDS", "100:126").split(":"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job, and what happens to it."""

    shape: str
    state: str
    policy: str
    inject: str

    def __str__(self) -> str:
        return " ".join([self.shape, self.state, self.policy, self.inject])


def drawn(seed: int) -> Case:
    """A worker loses a rank for good; then, or on the way there, up to three more die, of it or of others."""
    rng = random.Random(seed)
    shape, state = rng.choice(sorted(SHAPES)), rng.choice(STATES)
    _, size, _, workers = SHAPES[shape]
    first = rng.randrange(workers)
    points = IN_A_STEP + ("param_gather",) * bool(state)
    inject = [lost(first * size + rng.randrange(size), rng.randrange(1, 4))]
    for _ in range(rng.randint(1, 3)):
        inject.append(another(rng, size=size, workers=workers, first=first, steps=STEPS, points=points))
    return Case(shape=shape, state=state, policy=rng.choice(POLICIES), inject=";".join(inject))


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_whatever_happens_it_is_exact_or_says_what_is_lost(jobs, undisturbed, name, seed):
    case = drawn(seed)
    model, size, stages, workers = SHAPES[case.shape]
    job = f"{model} --train-iters {STEPS}"
    redundancy = "--odyssey-redundancy state" if stages == workers else ""
    flags = f"{job} {case.state} {redundancy} --odyssey-policy {case.policy} --odyssey-inject {case.inject}"
    flags += " --odyssey-hang-s 10 --odyssey-respawn 1"
    shot = jobs.run(name, ranks=workers * size, stages=stages, flags=flags, timeout_s=400.0)
    whole = undisturbed(job, ranks=size)
    if assert_exact_or_lost(shot, whole.run.steps, case):
        assert_equal_weights(shot.weights(), whole.weights())
