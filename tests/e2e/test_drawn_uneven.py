"""Gangs that are uneven already, or become so, and whoever dies then, in jobs and at points that a seed draws: the
numbers are those of a run without a failure, or the job says what it has lost.

    ODYSSEY_SEEDS=0:20 bash tests/run.sh tests/e2e/test_drawn_uneven.py -m matrix      # others than the suite's
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import torch

from tests.e2e.drawn import another, assert_exact_or_lost
from tests.e2e.jobs import Outcome, assert_equal_weights
from tests.e2e.test_shrinking import lost

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

SHAPES = {
    # expert-parallel ranks, tensor-parallel ranks, stages, gangs
    "two-of-three": (3, 1, 1, 2),
    "three-of-three": (3, 1, 1, 3),
    "two-of-four": (4, 1, 1, 2),
    "three-of-four": (4, 1, 1, 3),
    "two-of-five": (5, 1, 1, 2),
    "a-pipeline": (3, 1, 2, 2),
    "two-pipelines": (3, 1, 2, 4),
    "tensor": (3, 2, 1, 2),
}
ROUTERS = (
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-1 --moe-z-loss-coeff 1e-2 "
    "--moe-input-jitter-eps 1e-2",
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-enable-expert-bias",
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-expert-capacity-factor 1.25",
)
LAYERS = (
    "",
    "--moe-shared-expert-intermediate-size 16",
    "--moe-layer-freq 2",
    "--hidden-dropout 0.1 --attention-dropout 0.1",
    "--share-embeddings-and-output-weights",
    "--check-weight-hash-across-dp-replicas-interval 1",
    "--optimizer sgd",
    "--micro-batch-size 2",
    "--mtp-num-layers 1",
)
STATES = ("", "", "--use-distributed-optimizer", "--use-distributed-optimizer --odyssey-redundancy-level 2")
POLICIES = ("reroute", "reroute", "auto", "replan")
STEPS = 36
FIRST, LAST = (int(one) for one in os.environ.get("ODYSSEY_SEEDS", "200:212").split(":"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job, and what happens to it."""

    shape: str
    model: str
    flags: str
    inject: str

    def __str__(self) -> str:
        return " ".join([self.shape, self.model, self.flags, self.inject])


def drawn(seed: int) -> Case:
    """A gang loses a rank for good; then, or on the way there, up to three more ranks die, of it or of others."""
    rng = random.Random(seed)
    shape = rng.choice(sorted(SHAPES))
    experts, tensor, stages, gangs = SHAPES[shape]
    # Of fewer a gang at half the pace would be given none, where there are three.
    microbatches = 15 if gangs == 3 else rng.choice((4, 8, 10))
    model = [
        f"--expert-model-parallel-size {experts} --num-experts {experts * rng.choice((2, 2, 3, 5))}",
        f"--num-layers {2 * stages} --lr 1e-3 --global-batch-size {experts * microbatches}",
        rng.choice(ROUTERS),
        rng.choice(LAYERS),
        f"--moe-token-dispatcher-type {rng.choice(('alltoall', 'allgather'))}",
    ]
    if tensor > 1:
        model.append("--tensor-model-parallel-size 2 --sequence-parallel")
    flags = [rng.choice(STATES if gangs > 2 else STATES[:-1]), f"--odyssey-policy {rng.choice(POLICIES)}"]
    if stages == gangs or rng.random() < 0.2:
        flags.append("--odyssey-redundancy state")
    size = experts * tensor
    first = rng.randrange(gangs)
    inject = [lost(first * size + rng.randrange(size), rng.randrange(1, 4))]
    for _ in range(rng.randint(0, 3)):
        inject.append(another(rng, size=size, workers=gangs, first=first, steps=STEPS))
    return Case(shape=shape, model=" ".join(model), flags=" ".join(flags), inject=";".join(inject))


def whole_parts(shot: Outcome) -> dict[str, dict[str, torch.Tensor]]:
    """The weights at the end, as whole gangs have them: an uneven one writes a file for each run of experts."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, weights in shot.weights().items():
        found.setdefault(name.partition("+")[0], {}).update(weights)
    return found


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_whatever_happens_it_is_exact_or_says_what_is_lost(jobs, undisturbed, name, seed):
    case = drawn(seed)
    experts, tensor, stages, gangs = SHAPES[case.shape]
    size = experts * tensor
    job = f"{case.model} --train-iters {STEPS}"
    flags = f"{job} {case.flags} --odyssey-inject {case.inject} --odyssey-hang-s 10 --odyssey-respawn 1"
    shot = jobs.run(name, ranks=gangs * size, stages=stages, flags=flags, timeout_s=400.0)
    whole = undisturbed(job, ranks=size)
    if assert_exact_or_lost(shot, whole.run.steps, case):
        assert_equal_weights(whole_parts(shot), whole_parts(whole))
