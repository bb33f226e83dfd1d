"""These tests need torch; their other fixtures are in tests/conftest.py."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# The pure tests run without torch; these do not.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

# Before torch is imported: its store client complains, with a C++ stack, of every connection that ends.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.fixture
def rendezvous():
    from odyssey_megatron.launch.wire.local_rendezvous import LocalRendezvous

    return LocalRendezvous("test")


@pytest.fixture
def connect(rendezvous):
    """A connection to a real store, which lives as long as the test."""
    from odyssey_megatron.errors import ControlPlaneLost
    from odyssey_megatron.launch.wire.control import Control

    address = rendezvous.next_rendezvous().bootstrap_store_info

    def connect(token: str = "secret", **settings) -> Control:
        try:
            return Control.connect(address.master_addr, address.master_port, token, timeout_s=5, **settings)
        except ControlPlaneLost as error:  # seen once: nothing listened on the port of a store that was there
            error.add_note("sockets of this host at that port:\n" + sockets_at(address.master_port))
            raise

    return connect


def sockets_at(port: int) -> str:
    """Local and remote address, state and inode; 0A listens."""
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return "\n".join(one for one in lines if f":{port:04X} " in one) or "none"
