from __future__ import annotations

from tests.metrics.conftest import runs  # noqa: F401 - the same synthetic runs
