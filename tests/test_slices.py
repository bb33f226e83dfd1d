from __future__ import annotations

from pathlib import Path

import pytest

from tests.slices import BY_HAND, DRAWN, DRAWS, drawn

FAMILIES = sorted({family for draw in DRAWS for family in draw})
NAMES = [
    f"{family}{'' if '::' in family else '::test_some'}[{case}]" for family in FAMILIES for case in range(6)
]


def test_a_seed_draws_the_same_tests():
    slice_ = drawn("2026-01-01", NAMES)
    assert slice_ == drawn("2026-01-01", reversed(NAMES))
    assert len(slice_) == DRAWN < len(DRAWS)


def test_each_draw_takes_one_of_its_own():
    names = {draw: [name for name in NAMES if name.startswith(draw)] for draw in DRAWS}
    for draw in set(DRAWS):
        assert len(drawn("x", names[draw])) >= DRAWS.count(draw)


def test_seeds_come_round_to_all_tests():
    slices = [drawn(str(seed), NAMES) for seed in range(300)]
    assert set().union(*slices) == set(NAMES)
    assert len({frozenset(one) for one in slices}) == 300


def test_a_small_file_has_the_same_chance_as_a_large_one_beside_it():
    (draw,) = {draw for draw in DRAWS if "tests/e2e/test_shrinking.py" in draw}
    names = [f"{draw[0]}::test[{case}]" for case in range(100)] + [f"{draw[1]}::test"]
    taken = [one for seed in range(400) for one in drawn(str(seed), names)]
    assert 150 < taken.count(names[-1]) < 250


def test_what_was_not_collected_is_not_drawn():
    assert drawn("x", []) == set()
    assert drawn("x", ["tests/e2e/test_storms.py::test"]) == {"tests/e2e/test_storms.py::test"}
    assert drawn("x", ["tests/e2e/test_soak.py::test"]) == set()


def test_a_long_test_that_is_forgotten_is_an_error():
    with pytest.raises(ValueError, match="knows tests/test_new.py::test$"):
        drawn("x", [*NAMES, "tests/test_new.py::test"])


def test_what_starts_no_processes_is_drawn_only_if_it_takes_long(checkout):
    """Others run each time: a test that is drawn now and then may fail for weeks before anybody hears of it."""
    pure = [checkout / "tests" / name for name in ("plan", "policy", "diagnosis", "studies", "metrics")]
    files = [one for folder in pure for one in folder.glob("test_*.py")]
    marked = {one.name for one in files if "mark.matrix" in one.read_text()}
    assert marked == {"test_exact_layouts.py", "test_heavier.py"}


@pytest.mark.parametrize("family", [*FAMILIES, *BY_HAND])
def test_they_are_marked(checkout, family):
    """Else CI would draw nothing of a file that has been renamed, or whose tests are short by now."""
    file, _, test = family.partition("::")
    sources = [checkout / file] if file.endswith(".py") else sorted((checkout / file).glob("*.py"))
    found = "".join(Path(one).read_text() for one in sources)
    assert f"def {test}" in found
    assert "mark.matrix" in found or "cases_of(" in found
