"""Keeps track of slow ways between workers: links, which carry messages, and sums of gradients, grouped by cause."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from odyssey_megatron.cluster.state import ClusterState, SlowSums, with_slow_links, with_slow_sums
from odyssey_megatron.diagnosis.links import LEAST_FACTOR, SLOW_LINK, SLOW_SUMS, Link, Links, LinkVerdict
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.launch.coordinator.slowness import OVER, Slowness, evidence_of, ranks_of
from odyssey_megatron.plan.plan import Plan

_AGAIN = 0.75
"""As ``OVER``, for a link that was slow and is slow again: unless that began after it was over, it counts only from
here on. The steps that are looked at go back to before it was over.
"""


_Process = tuple[int, int]
"""(rank, incarnation)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Slowed:
    """The links and sums that one cause makes slow."""

    def __deepcopy__(self, memo: object) -> Slowed:
        """Return itself, as nothing of it changes: there may be tens of thousands of links."""
        return self

    all: frozenset[Link]
    """All links and sums that it makes slow, also those that have not been measured."""
    longer_s: Mapping[tuple[int, int], float]
    """(sender, receiver) -> the additional seconds of a message."""
    sums: tuple[SlowSums, ...] = ()
    """The slow sums. If there are any, ``longer_s`` is only expected, and ignored if messages there are measured."""
    processes: tuple[frozenset[_Process], ...] = ()
    """The processes at each of its ends, or on each node whose network is slow."""


class SlowWays:
    """The links, or the sums, that are slow now."""

    def __init__(self, told: Slowness):
        self._told = told
        self.slowed: dict[LinkVerdict, Slowed] = {}
        self.began_s: dict[LinkVerdict, float] = {}
        """Verdict -> the time since which it has been known."""
        self._recovered: dict[Link, tuple[int, float]] = {}
        """Link -> the step by which it was as fast as others again, and the factor by which it had been slow."""
        self._left: dict[Link, int] = {}
        """Link -> the newest step when it was forgotten, as all processes at one of its ends had left.

        Measurements up to that step are of those processes.
        """

    def look(
        self,
        found: Links,
        others: Iterable[Slowed],
        diagnosis: Diagnosis,
        state: ClusterState,
        live: Plan,
        now_s: float,
    ) -> list[str]:
        """Take in what ``diagnosis`` has ``found``, and return a line for each change.

        A link that no message takes any more, or a sum that is not computed any more, stays as it was when last
        measured. It is forgotten if all processes at one of its ends have left, as others come in their place, perhaps
        on another node.

        Args:
            others: What is slow besides, of the other kind.
        """
        why = self._forget_gone(state, found.newest)
        for one in [known for known in self.slowed if _is_over(known, found)]:
            del self.slowed[one]
            self._recovered |= dict.fromkeys(one.links, (found.newest, one.factor))
            self._told.lasted_s.append(now_s - self.began_s.pop(one))
            ranks = ranks_of(state, one.workers)
            self._told.event(
                one.kind, ranks, 1.0, "it takes no longer than others of the kind, or than before"
            )
            why.append(f"{_whose(one, ranks)} as fast as others again")
        for one in filter(lambda one: self._is_new(one, found), found.verdicts):
            slowed = replace(slowed_by(one, found, state), processes=_ends(one, state))
            now = [*others, *self.slowed.values()]
            before, after = (with_slow_ways(state, ways, diagnosis.links) for ways in (now, [*now, slowed]))
            seen = self._told.shown(one.since, before, after, diagnosis, live)
            ranks = ranks_of(state, one.workers)
            if not seen.is_so:
                self._told.doubt(one.links, ranks, one.evidence, seen)
                continue
            parts = [known for known in self.slowed if {*known.links} <= {*one.links}]
            for part in parts:
                del self.slowed[part], self.began_s[part]
            self.slowed[one], self.began_s[one] = slowed, now_s
            if (one.kind, {*one.workers}) not in [(part.kind, {*part.workers}) for part in parts]:
                self._told.event(one.kind, ranks, 1 / one.factor, evidence_of(one.evidence, seen))
            why.append(f"{_whose(one, ranks)} slow, {one.factor:.2f} times the time")
        return why

    def _forget_gone(self, state: ClusterState, newest: int) -> list[str]:
        """Forget what has lost all processes at one of its ends: their successors are not timed until a route uses
        it.
        """
        here = _processes(state, state.alive)
        gone = [one for one, slowed in self.slowed.items() if not all(end & here for end in slowed.processes)]
        for one in gone:
            del self.slowed[one], self.began_s[one]
            self._left |= dict.fromkeys(one.links, newest)
            self._told.event(
                one.kind, ranks_of(state, one.workers), 1.0, "who was at one of its ends has left"
            )
        return [f"{_whose(one, ranks_of(state, one.workers))}: it has left" for one in gone]

    def _is_new(self, one: LinkVerdict, found: Links) -> bool:
        """Whether ``one`` is not known yet, is confirmed, and is no echo of slowness that is over or of ranks that
        left.
        """
        known = {link for slowed in self.slowed.values() for link in slowed.all}
        if known >= {*one.links} or not _borne_out(one, found):
            return False
        if found.newest <= max(self._left.get(link, -1) for link in one.links):
            return False
        ended = [self._recovered.get(link, (-2, 1.0)) for link in one.links]
        is_old = all(one.since <= step for step, _ in ended)
        return not is_old or one.factor >= statistics.median(factor for _, factor in ended) ** _AGAIN


def _ends(one: LinkVerdict, state: ClusterState) -> tuple[frozenset[_Process], ...]:
    """Return the processes at each end of ``one``. Between more than two nodes it is a single end: no node is at
    fault.
    """
    if one.kind == SLOW_LINK or (one.kind == SLOW_SUMS and not one.nodes):
        return tuple(_processes(state, [worker]) for worker in one.workers)
    if len(one.nodes) != 2:
        return (_processes(state, one.workers),)
    on = ([worker for worker in one.workers if state.nodes[worker] == node] for node in one.nodes)
    return tuple(_processes(state, workers) for workers in on if workers)


def _processes(state: ClusterState, workers: Iterable[int]) -> frozenset[_Process]:
    incarnations = dict(state.incarnations)
    return frozenset((rank, incarnations.get(rank, 0)) for rank in ranks_of(state, [*workers]))


def slowed_by(one: LinkVerdict, found: Links, state: ClusterState) -> Slowed:
    """Return what the cause that verdict ``one`` of ``found`` names makes slow."""
    if one.kind == SLOW_SUMS:
        return Slowed(
            all=frozenset(one.links), longer_s=_messages(one, found, state), sums=_slow_sums(one, state)
        )
    longest_s = max(found.longer_s[link] for link in one.links)
    longer_s = {
        (sender, receiver): found.longer_s.get((sender, receiver), longest_s)
        for sender, receiver in _reach(one, state)
    }
    return Slowed(all=frozenset(longer_s), longer_s=longer_s)


def with_slow_ways(state: ClusterState, ways: Iterable[Slowed], measured: Links) -> ClusterState:
    """Return ``state`` in which all of ``ways`` are slow, and no others."""
    longest_s, sums = dict[tuple[int, int], float](), set[SlowSums]()
    for one in ways:
        sums.update(one.sums)
        if one.sums and not measured.factors.keys().isdisjoint(one.longer_s):
            continue
        longest_s |= {way: max(seconds, longest_s.get(way, 0.0)) for way, seconds in one.longer_s.items()}
    return with_slow_sums(with_slow_links(state, longest_s), sums)


def _borne_out(one: LinkVerdict, found: Links) -> bool:
    """Whether steps that were measured after ``one`` was certain confirm it by themselves."""
    looks = [found.latest[link] for link in one.links if link in found.latest]
    behind = found.newest > max(found.found[link] for link in one.links)
    return behind and bool(looks) and statistics.median(looks) >= LEAST_FACTOR


def _is_over(one: LinkVerdict, found: Links) -> bool:
    """Whether the last steps of ``one`` are nearer to healthy than to how slow it was.

    If times have become noisier nothing is certain, so nothing is over. Nor is it if its links are not measured any
    more, as no route uses them.
    """
    now = [link for link in one.links if link in found.latest]
    if not now or any(link in found.slow for link in now):
        return False
    limit: float = one.factor**OVER
    return statistics.median(found.factors[link] for link in now) < limit


def _whose(one: LinkVerdict, ranks: list[int]) -> str:
    """Return the name of what ``one`` is about; ``ranks`` are those of its workers."""
    if one.kind == SLOW_SUMS:
        return f"sums of rank(s) {ranks}"
    if one.kind == SLOW_LINK:
        return f"link between ranks {ranks}"
    if len(one.nodes) == 1:
        return f"network of node {one.nodes[0]}"
    return f"network between nodes {[*one.nodes]}" if one.nodes else f"network of rank(s) {ranks}"


def _slow_sums(one: LinkVerdict, state: ClusterState) -> tuple[SlowSums, ...]:
    """Return the slow sums: all that a node with a slow network shares with other nodes, else those that were
    measured.
    """
    if one.nodes:
        inside = tuple(sorted(worker for worker, node in state.nodes.items() if node in one.nodes))
        return (SlowSums(inside, True, one.factor),)
    return tuple(SlowSums(tuple(workers), False, one.factor) for workers in one.links)


def _messages(one: LinkVerdict, sums: Links, state: ClusterState) -> dict[tuple[int, int], float]:
    """Return (sender, receiver) -> additional seconds of a message from or to a node with slow sums.

    It is assumed that the node's network is slow. A sum over k workers of a message's size sends 2 (k - 1) / k times as
    many bytes (``plan.checking.simulate.reduce_s``). About sums of no particular node nothing is known.
    """
    if not one.nodes:
        return {}
    longer_s = max(sums.longer_s.get(of, 0.0) * len(of) / (2 * (len(of) - 1)) for of in one.links)
    inside = {worker for worker in state.alive if state.nodes[worker] in one.nodes}
    ways = product(inside, set(state.alive) - inside)
    return {way: longer_s for a, b in ways for way in ((a, b), (b, a))}


def _reach(one: LinkVerdict, state: ClusterState) -> set[tuple[int, int]]:
    """Return the links between living workers that ``one`` makes slow; between many nodes only those measured."""
    if len(one.nodes) > 2:
        return {(sender, receiver) for sender, receiver in one.links}
    ends = {*one.workers, *(worker for worker, node in state.nodes.items() if node in one.nodes)}
    ways = {way for a, b in product(ends, state.alive) if a != b for way in ((a, b), (b, a))}
    return {link for link in ways if one.concerns(link, state.nodes)}
