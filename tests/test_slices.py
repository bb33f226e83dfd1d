from __future__ import annotations

import pytest

from tests.slices import OF_EACH_FILE, drawn

NAMES = [f"{file}::test_some[{case}]" for file in OF_EACH_FILE for case in range(20)]


def test_a_seed_draws_the_same_tests_of_every_file():
    slice_ = drawn("2026-01-01", NAMES)
    assert slice_ == drawn("2026-01-01", reversed(NAMES))
    counts = {file: sum(name.startswith(file) for name in slice_) for file in OF_EACH_FILE}
    assert counts == OF_EACH_FILE


def test_seeds_come_round_to_all_tests():
    slices = [drawn(str(seed), NAMES) for seed in range(200)]
    assert set().union(*slices) == set(NAMES)
    assert len({frozenset(one) for one in slices}) == 200


def test_other_tests_are_never_drawn():
    assert not {name for name in drawn("x", [*NAMES, "tests/test_codec.py::test"]) if "codec" in name}


def test_a_file_without_tests_is_an_error():
    with pytest.raises(ValueError, match="nothing to draw from in tests/e2e/test_resume.py"):
        drawn("x", [name for name in NAMES if "resume" not in name])
