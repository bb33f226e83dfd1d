"""Embedding and head share a weight, wherever they lie."""

from __future__ import annotations

import pytest

from tests.megatron_lm.jobs import FLOAT32, MOCK, assert_same_iterations, assert_same_lines, behind_a_load
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
    "virtual-stages": (6, 3, f"{INTERLEAVED} --num-layers-per-virtual-pipeline-stage 1", "rank=3,step=2,at=backward"),
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


SAVES = {
    "every-holder": (6, 2, ""),
    "by-bucket": (4, 2, "--use-distributed-optimizer"),
    "by-parameter": (4, 2, "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --bf16"),
    "cells": (8, 2, "--use-distributed-optimizer --tensor-model-parallel-size 2 --bf16"),
    "learned-positions": (2, 1, "--use-distributed-optimizer --position-embedding-type learned_absolute"),
}


@pytest.mark.parametrize("case", SAVES)
def test_checkpoints_come_from_plain_megatron_lm_and_go_there(jobs, name, case):
    """Saved by a plain job, gone on with in another layout and saved by survivors, gone on with by a plain job."""
    ranks, stages, flags = SAVES[case]
    folders = [jobs.folder / f"{name}-{which}" for which in ("plain", "ours")]
    usual = f"{MOCK} {flags}"
    saving = "--save-interval 2 --exit-interval {}"
    jobs.plain(f"{usual} --save {folders[0]} {saving.format(2)}", ranks=ranks, stages=stages, without=TIED)
    whole = jobs.plain(usual, ranks=ranks, stages=stages, without=TIED)
    run = jobs.odyssey(
        f"{name}-on", f"{usual} --load {folders[0]} --save {folders[1]} {saving.format(4)} --odyssey-redundancy state",
        ranks=8 if case == "cells" else 4, stages=4, without=TIED,
        inject="rank=3,step=2,at=backward;rank=0,step=3,at=reduce",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-3000:]
    assert {0, 3} <= set(run.killed)
    last = jobs.plain(f"{usual} --load {folders[1]}", ranks=ranks, stages=stages, without=TIED)
    rel = 2e-3 if "bf16" in flags else FLOAT32
    assert_same_iterations(run.iterations, behind_a_load(whole.iterations[2:4]), rel=rel)
    assert_same_iterations(last.iterations, behind_a_load(whole.iterations[4:]), rel=rel)
