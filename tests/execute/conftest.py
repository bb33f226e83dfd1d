"""The job server is that of the tests of ``launch``."""

from tests.launch.conftest import server

__all__ = ["server"]
