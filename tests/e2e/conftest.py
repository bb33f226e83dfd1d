from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.e2e.jobs import LONG, Jobs, Outcome


@pytest.fixture(scope="session")
def undisturbed(jobs: Jobs) -> Callable[..., Outcome]:
    """(flags) -> that job without failures; run once. On two ranks it takes least, and no layout changes a result."""
    known: dict[tuple[str, int, int], Outcome] = {}
    numbers = itertools.count()  # one that was cut short has left things in its folder

    def run(flags: str = "", *, ranks: int = 2, stages: int = 1) -> Outcome:
        job = flags, ranks, stages
        if job not in known:
            outcome = jobs.run(
                f"undisturbed-{next(numbers)}", ranks=ranks, stages=stages, flags=flags, timeout_s=200.0
            )
            assert outcome.exit_code == 0, outcome.log[-4000:]
            known[job] = outcome
        return known[job]

    return run


@pytest.fixture
def reference(undisturbed: Callable[..., Outcome]) -> Outcome:
    """:data:`LONG` steps without failures."""
    return undisturbed(LONG)
