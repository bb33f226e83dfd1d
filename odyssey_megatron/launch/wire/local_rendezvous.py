"""The rendezvous of a single node, with a store that only this machine can reach.

torch's ``c10d`` rendezvous, which ``torchrun --standalone`` uses, listens on all interfaces.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "odyssey-local"
_LOOPBACK = "127.0.0.1"


class FixedRendezvous(RendezvousHandler):
    """A rendezvous of nodes that are all known beforehand: for torch, none joins or leaves once they have met."""

    def __init__(self, backend: str, run_id: str):
        self._backend, self._run_id = backend, run_id

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class LocalRendezvous(FixedRendezvous):
    """A rendezvous of one node, whose agent hosts the store on loopback."""

    def __init__(self, run_id: str):
        super().__init__(BACKEND, run_id)
        listener = socket.create_server((_LOOPBACK, 0), backlog=1024)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            _LOOPBACK,
            port,
            None,
            True,
            timedelta(seconds=300),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._address = RendezvousStoreInfo(master_addr=_LOOPBACK, master_port=port)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, self._address)


def register() -> None:
    """Register ``--rdzv-backend odyssey-local`` with torch."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return LocalRendezvous(parameters.run_id)

    rendezvous_handler_registry.register(BACKEND, create)
