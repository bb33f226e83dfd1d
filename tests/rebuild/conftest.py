"""The job server is that of the tests of ``launch``."""

from tests.launch.conftest import collect_ignore_glob, server

__all__ = ["collect_ignore_glob", "server"]
