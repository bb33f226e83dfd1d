"""Which agents are there: each renews its lease in the store."""

from __future__ import annotations

import time

from odyssey_megatron.cluster.events import Event, NodeLost
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.awake import Awake
from odyssey_megatron.launch.control import Control, Stamp


class Leases:
    """Notices agents that have fallen silent."""

    def __init__(self, control: Control, nodes: list[int], limit_s: float):
        self._control, self._limit_s = control, limit_s
        self._awake = Awake(limit_s)
        self.nodes = nodes
        self._seen: dict[int, tuple[Stamp | None, float]] = {}

    def watch(self, node: int) -> None:
        """``node`` has ranks (again). The first one is where this runs."""
        if node and node not in self.nodes:
            self.nodes.append(node)
            self._seen.pop(node, None)

    def expired(self, now_s: float) -> list[Event]:
        if not self.nodes:
            return []
        lost, awake_s = list[Event](), self._awake.since_s(now_s)
        beats = self._control.latest([keys.lease_key(node) for node in self.nodes])
        for node, (beat, _) in zip(list(self.nodes), beats, strict=True):
            before, since_s = self._seen.get(node, (None, now_s))
            if beat != before:
                self._seen[node] = (beat, now_s)
            elif now_s - max(since_s, awake_s) > self._limit_s:
                lost.append(NodeLost(node=node, t_s=now_s))
                self.nodes.remove(node)
        return lost


def beats(control: Control, node: int, limit_s: float) -> bool:
    """Whether the agent of ``node`` renews its lease; waits ``limit_s`` for it."""
    key, ends_s = [keys.lease_key(node)], time.monotonic() + limit_s
    before = control.latest(key)
    while time.monotonic() < ends_s:
        time.sleep(limit_s / 20)
        if control.latest(key) != before:
            return True
    return False
