"""Megatron-LM's own training cases that start under ``--odyssey`` do run, and lose a rank.

    MEGATRON_CASES=CASES.json python -m pytest -m matrix tests/megatron_lm/test_cases.py

``CASES.json`` is as for ``tests/benchmarks/launch_lines.py``; the table that it ends with has a row a case.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from tests.megatron_lm.cases import Case, distinct
from tests.megatron_lm.jobs import FLOAT32, FLOAT64, MegatronJobs, assert_same_lines

PATH = os.environ.get("MEGATRON_CASES", "")
FOUND = {one.names[0]: one for one in distinct(Path(PATH), "0.16.1")} if PATH else {}
BFLOAT16 = 2e-3
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PATH, reason="MEGATRON_CASES names no file"),
]


PRECISIONS = {
    "float32": ("", FLOAT32),
    "bf16": ("--bf16", BFLOAT16),
    "float64": ("--odyssey-float64 on", FLOAT64),
}
"""Flags; and how near losses are to plain Megatron-LM's, or, in float64, which that has not, to those of the same job
that loses nobody.
"""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", FOUND)
def test_a_case_loses_a_rank_and_prints_what_it_would_have(jobs, name, record_property, case, precision):
    found = FOUND[case]
    record_property("cases", len(found.names))
    assert_a_loss_changes_nothing(jobs, name, found, precision)


def assert_a_loss_changes_nothing(jobs: MegatronJobs, name: str, found: Case, precision: str) -> None:
    """Run ``found`` without a loss and with one. Skips what a CPU has not."""
    case = found.names[0]
    if found.needs:
        pytest.skip(f"needs {found.needs}")
    is_fp16 = "--fp16" in found.flags
    if is_fp16 and precision != "float32":
        pytest.skip("is of fp16")
    flags, rel = PRECISIONS[precision]
    folder = jobs.folder / name
    how = {"ranks": found.ranks, "stages": found.stages, "model": found.flags, "script": found.script}
    save, kept = f"{flags} --save-interval 3 --save {folder}", "--odyssey-redundancy state"
    if precision == "float64":
        whole = jobs.odyssey(f"{name}-whole", f"{save}-whole {kept}", **how)
    else:  # Megatron-LM's process that writes checkpoints asks for a GPU
        whole = jobs.plain(f"{save}-plain", **how, without="--use-persistent-ckpt-worker")
    # One of them, always the same; of whatever has a single holder there is a second one.
    victim = zlib.crc32(case.encode()) % found.ranks
    point = ("forward", "backward", "reduce", "optimizer")[zlib.crc32(case.encode()) // 64 % 4]
    inject = f"rank={victim},step={min(2, len(whole.iterations) - 1)},at={point}"
    run = jobs.odyssey(name, f"{save}-saved {kept}", **how, inject=inject)
    assert_same_lines(run, whole, rel=BFLOAT16 if is_fp16 else rel)
    assert victim in run.killed
