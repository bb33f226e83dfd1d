"""Shared by all tests. Tests that need torch or megatron import them themselves, so that the pure ones run without."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The repository root."""
    return Path(__file__).parent.parent
