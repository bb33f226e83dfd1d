"""Notices agents that are gone, by their leases in the store, and a job's host that is gone, as the store is silent."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from odyssey_megatron.cluster.events import NodeLost
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.awake import Awake, Pauses
from odyssey_megatron.launch.wire.control import Control, Stamp
from odyssey_megatron.launch.wire.lost_host import COMES_BACK_S, connections_to
from odyssey_megatron.metrics.outlet import say

_LOOK_S = 0.1
_LEFT_ALONE = (
    "this host of the job stood still for {lasted_s:.1f} s. The other nodes wait {waits_s:g} s for it "
    "(--odyssey-node-lease-s + {beyond_s:g} s), and have left the job. Start it again, from its last checkpoint."
)


class Leases:
    """Notices agents that have fallen silent.

    Args:
        nodes: The nodes whose agents are there, other than ``here``.
        here: The node on which this runs, if it is one of the job's.
        pauses: When this process stood still for as long as the others wait for it. None: it never does.
    """

    def __init__(
        self,
        control: Control,
        nodes: list[int],
        limit_s: float,
        *,
        here: int | None,
        pauses: Pauses | None = None,
    ):
        self._control, self._limit_s, self._here = control, limit_s, here
        self._awake, self._pauses = Awake(limit_s), pauses
        self.nodes = nodes
        self._seen: dict[int, tuple[Stamp | None, float]] = {}
        self._looked_s = self._there_s = -float("inf")
        """When it was last looked, and after which look another node has last renewed its lease."""

    def watch(self, node: int) -> None:
        """Watch ``node``, which has ranks (again)."""
        if node != self._here and node not in self.nodes:
            self.nodes.append(node)
            self._seen.pop(node, None)

    def expired(self, now_s: float) -> list[NodeLost]:
        if not self.nodes:
            return []
        lost, awake_s = list[NodeLost](), self._awake.since_s(now_s)
        beats = self._control.latest([keys.lease_key(node) for node in self.nodes])
        for node, (beat, _) in zip(list(self.nodes), beats, strict=True):
            before, since_s = self._seen.get(node, (None, now_s))
            if beat != before:
                self._seen[node] = (beat, now_s)
                if before is not None:
                    self._there_s = self._looked_s
                    if beat.incarnation > before.incarnation:
                        # Another agent has come before the loss of this one was noticed.
                        lost.append(NodeLost(node=node, t_s=now_s))
            elif now_s - max(since_s, awake_s) > self._limit_s:
                lost.append(NodeLost(node=node, t_s=now_s))
                self.nodes.remove(node)
        self._looked_s = now_s
        return lost

    def left_alone(self, lost: Sequence[int]) -> str:
        """Return why the job is over, if the other nodes have left because this host stood still; else nothing.

        One that renews its lease after the pause has stayed, and so have all that were there.

        Args:
            lost: The nodes that were just found lost, and had living ranks.
        """
        pauses, limit_s = self._pauses, self._limit_s
        another_agent_came = not set(lost).isdisjoint(self.nodes)
        if pauses is None or not (lost and pauses.lasted_s) or another_agent_came:
            return ""
        # What was on its way when a node left arrives soon after the pause.
        if self._there_s > pauses.ended_s + limit_s / 2:
            return ""
        waits_s = limit_s + COMES_BACK_S
        return _LEFT_ALONE.format(lasted_s=pauses.lasted_s, waits_s=waits_s, beyond_s=COMES_BACK_S)


class HostOfJob:
    """Tells an agent whether the host of the job, on another node, still answers.

    A host's kernel answers for a process that is stopped. A connection to it does not break at once (``lost_host.py``),
    and waiting on it would last for as long as the process is stopped.
    """

    def __init__(self, limit_s: float):
        self._limit_s, self._heard_s = limit_s + COMES_BACK_S, time.monotonic()
        self.ends = False
        """Whether somebody has asked for the end of the job."""
        self._awake = Awake(self._limit_s)

    def listen(self, control: Control) -> None:
        """Keep :attr:`ends` up to date for ever, without a lease: for the agent where the job is hosted."""
        while True:
            self.ends = control.said(keys.END)
            time.sleep(_LOOK_S)

    def renew(self, control: Control, node: int, every_s: float, incarnation: int) -> None:
        """Renew the lease of ``node`` until another agent has taken the place of this one.

        An agent that stood still for long would otherwise go on as if nothing had happened. The sign of life is the
        stamp of the value that is put.
        """
        while control.counted(keys.replaced_key(node)) <= incarnation:
            control.put(keys.lease_key(node), "")
            self.ends = control.said(keys.END)  # this waits for an answer
            self._heard_s = time.monotonic()
            time.sleep(every_s)

    def await_loss(self, port: int) -> None:
        """Wait until the host has not answered for too long, then have all waits of this process for it fail."""
        now_s = self._heard_s
        while now_s - max(self._heard_s, self._awake.since_s(now_s)) < self._limit_s:
            time.sleep(_LOOK_S)
            now_s = time.monotonic()
        say(f"[odyssey] the job's host has not answered for {self._limit_s:g} s.")
        for connection in connections_to(port):
            connection.shutdown(socket.SHUT_RDWR)


def beats(control: Control, node: int, limit_s: float) -> bool:
    """Whether the agent of ``node`` renews its lease within ``limit_s``."""
    key, ends_s = [keys.lease_key(node)], time.monotonic() + limit_s
    while not control.has(key):  # it is just starting, or has ended before it had one
        if time.monotonic() > ends_s:
            return False
        time.sleep(limit_s / 20)
    ends_s = time.monotonic() + limit_s
    before = control.latest(key)
    while time.monotonic() < ends_s:
        time.sleep(limit_s / 20)
        if control.latest(key) != before:
            return True
    return False
