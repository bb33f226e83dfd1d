"""Who starts processes again where others have ended: the product's own rules, for a job of one node."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.launch.agent.respawn import Respawn
from tests.strict.control import Coordinator, Journal
from tests.strict.machine import this_host


class Agent(Respawn):
    """Time is nothing to it: whatever is due comes as soon as it has its turn.

    Args:
        start: starts a process: its rank, slot and incarnation, and how many places of a whole cell it fills.
        vacate: ends what runs in a slot.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        ranks: int,
        *,
        start: Callable[[int, int, int, int], None],
        vacate: Callable[[int], None],
    ):
        envs = {rank: {"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)}
        control: Any = coordinator.store
        journal: Any = Journal()
        super().__init__(SimpleNamespace(envs=envs), control, coordinator.config, None, journal)
        self._store, self._start_process, self._vacate = coordinator.store, start, vacate
        self._ended: list[tuple[int, int, int]] = []

    def ended(self, rank: int, slot: int, code: int) -> None:
        """A process has, with ``code``."""
        incarnation = self._incarnations.get(rank, 0)
        self._store.send(RankDied(rank=rank, code=code, cause="killed", incarnation=incarnation))
        self._ended.append((rank, slot, code))

    def run(self) -> None:
        while True:
            this_host().wait(lambda: bool(self._ended))
            ended = self._ended.pop(0)
            if self._store.over:
                continue
            self.note_end(*ended, now_s=1.0)
            for slot in [*self.wanted]:
                self._vacate(slot)
            for rank, slot in self.due(math.inf):
                _, incarnation = self.begin(rank, slot, now_s=1.0)
                self._start_process(rank, slot, incarnation, self._smaller_size(rank))
