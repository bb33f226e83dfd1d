"""These tests need torch; their other fixtures are in tests/conftest.py."""

from __future__ import annotations

import importlib.util
import os

import pytest

# The pure tests run without torch; these do not.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

# Before torch is imported: its store client complains, with a C++ stack, of every connection that ends.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.fixture
def rendezvous():
    from odyssey_megatron.launch.local_rendezvous import LocalRendezvous

    return LocalRendezvous("test")


@pytest.fixture
def connect(rendezvous):
    """A connection to a real store, which lives as long as the test."""
    from odyssey_megatron.launch.control import Control

    address = rendezvous.next_rendezvous().bootstrap_store_info

    def connect(token: str = "secret", **settings) -> Control:
        return Control.connect(address.master_addr, address.master_port, token, timeout_s=5, **settings)

    return connect
