"""Megatron-LM's own training cases that need Transformer Engine: as ``tests/megatron_lm/test_cases.py``, with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.megatron_lm.cases import STILL_NEEDS, WITH_TRANSFORMER_ENGINE, distinct
from tests.megatron_lm.test_cases import assert_a_loss_changes_nothing

PATH = os.environ.get("MEGATRON_CASES", "")
WITHOUT = {one.names[0] for one in distinct(Path(PATH), "0.16.1") if not one.needs} if PATH else set()
FOUND = (
    {
        one.names[0]: one
        for one in distinct(Path(PATH), "0.16.1", needed=STILL_NEEDS, on_a_cpu=WITH_TRANSFORMER_ENGINE)
        if not {*one.names} & WITHOUT
    }
    if PATH
    else {}
)
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PATH, reason="MEGATRON_CASES names no file"),
]


@pytest.mark.parametrize("case", FOUND)
def test_a_case_loses_a_rank_and_prints_what_it_would_have(megatron_jobs, name, case):
    assert_a_loss_changes_nothing(megatron_jobs, name, FOUND[case], "float32")
