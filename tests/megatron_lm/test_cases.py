"""Megatron-LM's own training cases that start under ``--odyssey`` do run, and lose a rank.

    MEGATRON_CASES=CASES.json python -m pytest -m matrix tests/megatron_lm/test_cases.py

``CASES.json`` is as for ``tests/benchmarks/launch_lines.py``; the table that it ends with has a row a case.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from tests.megatron_lm.cases import distinct
from tests.megatron_lm.jobs import FLOAT32, assert_same_lines

PATH = os.environ.get("MEGATRON_CASES", "")
FOUND = {one.names[0]: one for one in distinct(Path(PATH), "0.16.1")} if PATH else {}
BFLOAT16 = 2e-3
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PATH, reason="MEGATRON_CASES names no file"),
]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("case", FOUND)
def test_a_case_loses_a_rank_and_prints_what_it_would_have(jobs, name, record_property, case, precision):
    found = FOUND[case]
    record_property("cases", len(found.names))
    if found.needs:
        pytest.skip(f"needs {found.needs}")
    is_fp16 = "--fp16" in found.flags
    if is_fp16 and precision == "bf16":
        pytest.skip("is of fp16")
    folder = jobs.folder / name
    flags = "--bf16" if precision == "bf16" else ""
    how = {"ranks": found.ranks, "stages": found.stages, "model": found.flags, "script": found.script}
    # Megatron-LM's process that writes checkpoints asks for a GPU.
    without = "--use-persistent-ckpt-worker"
    plain = jobs.plain(f"{flags} --save {folder}-plain --save-interval 3", **how, without=without)
    # One of them, always the same; of whatever has a single holder there is a second one.
    victim = zlib.crc32(case.encode()) % found.ranks
    point = ("forward", "backward", "reduce", "optimizer")[zlib.crc32(case.encode()) // 64 % 4]
    run = jobs.odyssey(
        name, f"{flags} --save {folder}-saved --save-interval 3 --odyssey-redundancy state", **how,
        inject=f"rank={victim},step={min(2, len(plain.iterations) - 1)},at={point}",
    )  # fmt: skip
    assert_same_lines(run, plain, rel=BFLOAT16 if flags or is_fp16 else FLOAT32)
    assert victim in run.killed
