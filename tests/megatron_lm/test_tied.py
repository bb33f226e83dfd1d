"""Embedding and head share a weight, wherever they lie."""

from __future__ import annotations

import pytest

from tests.megatron_lm.jobs import MOCK, assert_same_lines
from tests.megatron_lm.test_flags import INTERLEAVED

TIED = "--untie-embeddings-and-output-weights"
"""Without this flag they do."""
CASES = {
    "first-and-last": (6, 2, "", "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"),
    "one-pipeline-is-left": (
        6, 2, "", "rank=1,step=1,at=forward;rank=3,step=1,at=forward;rank=5,step=2,at=agreement;rank=0,step=4,"
        "at=weight_grad"
    ),
    "learned-positions": (
        8, 4, "--position-embedding-type learned_absolute",
        "rank=0,step=1,at=forward;rank=7,step=1,at=forward;rank=1,step=3,at=optimizer",
    ),
    "shared-out-optimizer": (
        8, 2, "--use-distributed-optimizer",
        "rank=0,step=1,at=optimizer;rank=4,step=2,at=forward;rank=7,step=3,at=commit",
    ),
    "cells": (8, 2, "--tensor-model-parallel-size 2", "rank=0,step=1,at=backward;rank=6,step=3,at=reduce"),
    "virtual-stages": (4, 2, f"{INTERLEAVED} --num-layers-per-virtual-pipeline-stage 1", "rank=3,step=2,at=backward"),
    "one-stage": (3, 1, "", "rank=0,step=1,at=backward;rank=1,step=3,at=reduce"),
    "bf16": (4, 2, "--bf16", "rank=0,step=2,at=backward"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_lines_are_those_of_plain_megatron_lm(jobs, name, case):
    ranks, stages, flags, inject = CASES[case]
    flags = f"{MOCK} {flags}"
    run = jobs.odyssey(name, flags, ranks=ranks, stages=stages, inject=inject, without=TIED)
    assert_same_lines(run, jobs.plain(flags, ranks=ranks, stages=stages, without=TIED))
    cell = 2 if case == "cells" else 1
    assert len(run.killed) == cell * inject.count("rank="), run.log[-3000:]
