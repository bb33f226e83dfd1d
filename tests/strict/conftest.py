"""These tests need torch, as those of ``launch`` do."""

from tests.launch.conftest import collect_ignore_glob

__all__ = ["collect_ignore_glob"]
