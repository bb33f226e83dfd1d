"""A slice of the long tests: a few of each file's, drawn by a seed, so that every run of CI tries others.

python -m pytest -m matrix --slice SEED tests/e2e      # the same seed draws the same tests
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import PurePosixPath

OF_EACH_FILE = {
    "tests/e2e/test_matrix.py": 2,
    "tests/e2e/test_exactness.py": 1,
    "tests/e2e/test_two_speed.py": 1,
    "tests/e2e/test_rejoin.py": 1,
    "tests/e2e/test_resume.py": 1,
    "tests/e2e/test_storms.py": 1,
    "tests/e2e/test_shrinking.py": 1,
    "tests/e2e/test_drawn_shapes.py": 1,
}
"""How many: all together take about two minutes on two cores."""


def drawn(seed: str, names: Iterable[str]) -> set[str]:
    """Of the tests ``names`` (pytest's, ``file::test[case]``) those in the slice. Raises ValueError if a file has none.

    A test is in or out by its own name, so that a new one moves few others.
    """
    by_file: dict[str, list[str]] = {file: [] for file in OF_EACH_FILE}
    for name in names:
        file = str(PurePosixPath(name.split("::")[0]))
        if file in by_file:
            by_file[file].append(name)
    if empty := sorted(file for file, found in by_file.items() if not found):
        raise ValueError(f"nothing to draw from in {', '.join(empty)}; give -m matrix and tests/e2e")

    def lot(name: str) -> str:
        return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()

    return {name for file, most in OF_EACH_FILE.items() for name in sorted(by_file[file], key=lot)[:most]}
