"""These tests need torch, as those of ``launch`` do."""

import pytest

from tests.launch.conftest import collect_ignore_glob

pytest.register_assert_rewrite("tests.strict.checking")

__all__ = ["collect_ignore_glob"]
