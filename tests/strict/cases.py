"""Random jobs, and what happens to them."""

from __future__ import annotations

import random
from dataclasses import replace

from odyssey_megatron.policy.profile import Attention, Precision, Profile, estimated_profile
from tests.execute.stack import LAYERS, WIDTH
from tests.strict.job import Case, Kill

SHAPES = ((1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1))
"""(stages, replicas)."""
SLICED = ((1, 3), (1, 4), (1, 5), (2, 3), (3, 3))
"""Those in which a layer's optimizer state is cut over more holders than there are copies."""
POINTS = ("forward", "backward", "weight_grad", "reduce", "agreement", "optimizer", "commit")
PHASES = ("groups", "connect", "agree", "transfer")


def profile(draw: random.Random | None = None) -> Profile:
    """Of the stack; with ``draw`` its layers cost unlike times, so that schedules and partitions are others. Each
    layer is summed by itself, beside the others.
    """
    same = estimated_profile(
        num_transformer_layers=LAYERS - 2, hidden_size=WIDTH, ffn_hidden_size=WIDTH,
        attention=Attention.grouped(WIDTH, 1, 1, WIDTH), seq_length=2, micro_batch_size=1, vocab_size=WIDTH,
        precision=Precision(dtype_bytes=8), flops_per_s=1e9,
    )  # fmt: skip
    same = replace(same, costs=replace(same.costs, bucket_bytes=0))
    if draw is None:
        return same
    layers = tuple(
        replace(
            one,
            forward_s=one.forward_s * draw.uniform(0.3, 3.0),
            input_grad_s=one.input_grad_s * draw.uniform(0.3, 3.0),
            weight_grad_s=one.weight_grad_s * draw.uniform(0.0, 3.0),
        )
        for one in same.costs.layers
    )
    return replace(same, costs=replace(same.costs, layers=layers))


def case(number: int, *, copies: int = 0) -> Case:
    """The job of that number: one or two ranks die anywhere, perhaps one more in the recovery. ``copies``: of slices of
    optimizer state; 0: every holder keeps all.
    """
    draw = random.Random(number)
    stages, replicas = draw.choice(SLICED if copies else SHAPES)
    points = (*POINTS, "param_gather") if copies else POINTS
    ranks = stages * replicas
    redundancy = (
        draw.choice(("state", "compute")) if replicas == 1 else draw.choice(("off", "state", "compute"))
    )
    kills = [
        Kill(rank=draw.randrange(ranks), step=draw.randrange(2), point=draw.choice(points))
        for _ in range(draw.choice((0, 1, 1, 1, 2)))
    ]
    if kills and draw.random() < 0.3:
        kills.append(replace(kills[0], rank=draw.randrange(ranks), point=draw.choice(PHASES), generation=2))
    lost = {one.rank for one in kills}
    if len(lost) == ranks:
        kills = kills[:1]
    return Case(
        stages=stages,
        replicas=replicas,
        profile=profile(draw),
        steps=3 if copies else 2,
        copies=copies,
        kills=tuple(kills),
        flags={"policy": draw.choice(("auto", "reroute", "replan")), "redundancy": redundancy},
    )
