"""These tests need torch; their fixtures are in tests/conftest.py."""

from __future__ import annotations

import importlib.util
import os

# The pure tests run without torch; these do not.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

# Before torch is imported: its store client complains, with a C++ stack, of every connection that ends.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
