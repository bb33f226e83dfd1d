"""These tests need torch, as those of ``launch`` do."""

import gc

import pytest

from tests.launch.conftest import collect_ignore_glob

pytest.register_assert_rewrite("tests.strict.checking")

__all__ = ["collect_ignore_glob"]


@pytest.fixture(autouse=True)
def _seldom_collects():
    """A run makes much that is used until its end: looking for garbage in it would be a fifth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    yield
    gc.set_threshold(*before)
