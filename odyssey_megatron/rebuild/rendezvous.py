"""Stores through which the members of a group meet while they connect. Waits end as soon as the generation ends."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from odyssey_megatron.errors import PeerFailed, Superseded
from odyssey_megatron.rebuild.abort import Abort

_POLL_S = (0.0003, 0.004)
"""First and longest pause between two looks at the store."""


class Rendezvous(dist.Store):
    """The store for gloo, which asks for its peers' values one by one, and waits in C++ for each.

    Here all peers' values come in one round trip: each rank publishes what it sets under its index in the group.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int, abort: Abort):
        super().__init__()
        self._store, self._abort = store, abort
        self.prefix = prefix
        self._mine, self._all = f"{prefix}/{rank}", [f"{prefix}/{index}" for index in range(size)]
        self._values: dict[str, bytes] = {}

    def part(self, name: str, rank: int, size: int) -> Rendezvous:
        """Return a store for some of the members. ``rank`` is this rank's index among them."""
        return Rendezvous(self._store, f"{self.prefix}/{name}", rank, size, self._abort)

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._mine, f"{key}\0{bytes(value).hex()}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not all(key in self._values for key in keys):
            self._fetch(timeout)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _fetch(self, timeout: timedelta | None) -> None:
        wait_for(self._store, self._all, timeout, self._abort)
        for entry in self._store.multi_get(self._all):
            key, _, value = entry.decode().partition("\0")
            self._values[key] = bytes.fromhex(value)
        self._abort.meet(self._values.values())


class ByKey(dist.Store):
    """The store for NCCL, with which one member sets what the others get."""

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int, abort: Abort):
        super().__init__()
        self._store, self._abort, self.prefix = store, abort, prefix

    def clone(self) -> dist.Store:
        return dist.PrefixStore(self.prefix, self._store)

    def set(self, key: str, value: Any) -> None:
        self._store.set(f"{self.prefix}/{key}", bytes(value).hex())

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes.fromhex(self._store.get(f"{self.prefix}/{key}").decode())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait_for(self._store, [f"{self.prefix}/{key}" for key in keys], timeout, self._abort)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([f"{self.prefix}/{key}" for key in keys])


def wait_for(store: dist.Store, keys: list[str], timeout: timedelta | None, abort: Abort) -> None:
    """Wait until all ``keys`` are in ``store``.

    Raises:
        Superseded: The generation ended first.
        PeerFailed: Some are missing after ``timeout`` (60 s by default).
    """
    timeout_s = timeout.total_seconds() if timeout else 60.0
    ends_s, (pause_s, longest_s) = time.monotonic() + timeout_s, _POLL_S
    while not store.check(keys):
        if abort.fired:
            raise Superseded("a newer generation exists")
        if time.monotonic() > ends_s:
            missing = [key for key in keys if not store.check([key])]
            raise PeerFailed(f"nothing of {missing} within {timeout_s} s")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)
