"""Slow links and their causes: one link, all links of a worker or of a node, or all between two nodes.

A link's time is what a message takes once both its ends are ready. It is compared with links of its kind, within a node
or between nodes; or with its own past, if there are too few of its kind, or if most links between nodes have become
slower at once. A slowness that all links within a node share is nobody's: others may be using the node. Sums over
holders are treated likewise. History in, verdicts out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from odyssey_megatron.diagnosis.change import FALSE_ALARM_STEPS, RECENT, LevelShift, noise, raised
from odyssey_megatron.diagnosis.timings import Floats

SLOW_LINK, SLOW_NETWORK, SLOW_SUMS = "slow link", "slow network", "slow sums"
LEAST_FACTOR = 1.5
"""A link is slow if it takes at least this many times as long as others: no two links are quite alike. For several
links with one cause the median counts.
"""
_LEAST = math.log(LEAST_FACTOR)
_CLEAR = 3.0
"""The number of times their noise by which times must have risen. Where small messages take 0.1 or 2 ms by turns, the
usual time is one of the two, and half of the others may be above it: that would add up, however long it has been so.
"""
_KIN = 3
"""With fewer pairs of workers with links of a kind, each link is compared with itself."""
_LEAST_STEPS = 3

Link = tuple[int, ...]
"""(sending worker, receiving worker); for a sum, all workers that take part in it."""
_Pair = frozenset[int]


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """The time of one message in a measured step, the fastest of a few."""

    step: int
    sender: int
    receiver: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SumTiming:
    """The time of a sum as large as a message in a measured step, the fastest of a few."""

    step: int
    workers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkVerdict:
    """One cause, and the links that it makes slow."""

    def __deepcopy__(self, memo: object) -> LinkVerdict:
        """Return itself, as nothing of it changes."""
        return self

    kind: str
    """``slow link``, ``slow network`` or ``slow sums``."""
    links: tuple[Link, ...]
    workers: tuple[int, ...]
    """The workers concerned: the two ends of the link, or all whose network is slow."""
    nodes: tuple[int, ...] = ()
    """The node whose network is slow, or the nodes between which it is; empty if the cause is a link or a worker."""
    factor: float
    """The median of the links' factors."""
    since: int = -1
    """The first slow step."""
    evidence: str

    def concerns(self, link: Link, nodes: Mapping[int, int]) -> bool:
        """Whether this cause makes ``link`` slow, measured or not. ``nodes``: the node of each worker."""
        if self.kind == SLOW_LINK:
            return link in self.links
        ends = {nodes[link[0]], nodes[link[1]]}
        if not self.nodes:
            return self.workers[0] in link
        return len(ends) == 2 and (ends <= {*self.nodes} or (len(self.nodes) == 1 and self.nodes[0] in ends))


@dataclass(frozen=True, eq=False, kw_only=True)
class Links:
    """The diagnosis of links, or of sums, from a window of steps."""

    verdicts: tuple[LinkVerdict, ...] = ()
    factors: Mapping[Link, float] = field(default_factory=dict)
    """Each measured link -> its time relative to others of its kind, by its last measured steps."""
    slow: Mapping[Link, float] = field(default_factory=dict)
    """Each link that is slow now -> its factor."""
    longer_s: Mapping[Link, float] = field(default_factory=dict)
    """Each link that is slow now -> how much longer a message takes than usual."""
    found: Mapping[Link, int] = field(default_factory=dict)
    """Each link whose times have risen -> the step that made it certain."""
    latest: Mapping[Link, float] = field(default_factory=dict)
    """As ``factors``, by the newest step alone, for links that were measured in it."""
    newest: int = -1
    """The newest measured step; -1: none."""


@dataclass(frozen=True, slots=True)
class _Series:
    """The measured steps of one link, and the logs of its times relative to the usual one."""

    steps: tuple[int, ...]
    values: Floats
    usual_s: float


def diagnose_links(timings: Iterable[LinkTiming], nodes: Mapping[int, int], least_s: float = 0.0) -> Links:
    """Return which links are slow.

    Args:
        nodes: the node of each worker.
        least_s: a link that takes less than this longer than usual delays nobody, and gets no verdict.
    """
    rows: dict[Link, dict[int, float]] = {}
    for one in timings:
        rows.setdefault((one.sender, one.receiver), {})[one.step] = one.seconds
    return _diagnosed(rows, nodes, least_s, _causes)


def diagnose_sums(timings: Iterable[SumTiming], nodes: Mapping[int, int], least_s: float = 0.0) -> Links:
    """Return which sums between nodes are slow. Sums over the same number of workers are of one kind.

    The arguments are those of :func:`diagnose_links`.
    """
    rows: dict[Link, dict[int, float]] = {}
    for one in (one for one in timings if len({nodes.get(worker) for worker in one.workers}) > 1):
        rows.setdefault(one.workers, {})[one.step] = one.seconds
    return _diagnosed(rows, nodes, least_s, _causes_of_sums)


def _diagnosed(
    rows: Mapping[Link, Mapping[int, float]],
    nodes: Mapping[int, int],
    least_s: float,
    causes: Callable[[Mapping[Link, float], Collection[Link], Mapping[int, int]], list[LinkVerdict]],
) -> Links:
    """Return the diagnosis from the times of each link (step -> seconds), explained by ``causes``."""
    series = _apart({link: of for link, of in rows.items() if {*link} <= nodes.keys()}, nodes)
    if not series:
        return Links()
    newest = max(one.steps[-1] for one in series.values())
    usual = noise([one.values for one in series.values()])
    slow, since, found = dict[Link, float](), dict[Link, int](), dict[Link, int]()
    for link, one in series.items():
        if len(one.steps) < _LEAST_STEPS:
            continue
        shift = _raised(one.values, max(usual, noise([one.values])))
        if shift is not None and shift.log_ratio >= _LEAST / 2:
            slow[link], since[link] = math.exp(shift.log_ratio), one.steps[shift.since]
            found[link] = one.steps[shift.found]
    verdicts = [
        _with_evidence(one, since, series)
        for one in causes(slow, series.keys(), nodes)
        if one.factor >= LEAST_FACTOR
        and max(series[link].usual_s * (slow[link] - 1) for link in one.links) >= least_s
    ]
    accused = {link for one in verdicts for link in one.links}
    slow = {link: factor for link, factor in slow.items() if link in accused}
    return Links(
        verdicts=tuple(verdicts),
        longer_s={link: series[link].usual_s * (factor - 1) for link, factor in slow.items()},
        factors={link: math.exp(float(np.median(one.values[-RECENT:]))) for link, one in series.items()},
        slow=slow,
        found=found,
        latest={
            link: math.exp(float(one.values[-1])) for link, one in series.items() if one.steps[-1] == newest
        },
        newest=newest,
    )


def _apart(rows: Mapping[Link, Mapping[int, float]], nodes: Mapping[int, int]) -> dict[Link, _Series]:
    """Return, for each link, how far its times are from what its kind has in common, step by step."""
    logs = {
        link: {step: math.log(max(s, 1e-9)) for step, s in sorted(of.items())} for link, of in rows.items()
    }
    kinds: dict[tuple[bool, int], list[Link]] = {}
    for link in logs:
        kinds.setdefault((len({nodes[worker] for worker in link}) > 1, len(link)), []).append(link)
    found, all_slower = {}, False
    for (is_between, _), links in sorted(kinds.items()):
        count = len({frozenset(link) for link in links})
        if count == 1 and not is_between:
            continue  # anybody else who uses the node would make it look slow
        own = {link: float(np.quantile([*logs[link].values()], 0.25)) for link in links}
        if count >= _KIN:
            # Nothing makes a link faster than healthy, so the faster half of the links says what is usual.
            own = dict.fromkeys(links, _lower(float(np.median([*logs[link].values()])) for link in links))
        common = _common(logs, own) if count >= _KIN or not is_between else {}
        if common and _has_risen(np.array([*common.values()])):
            all_slower |= not is_between  # slower within nodes, too: not the network
            if not all_slower:
                own = {link: float(np.quantile([*logs[link].values()], 0.25)) for link in links}
                common = {}
        for link in links:
            values = [value - own[link] - common.get(step, 0.0) for step, value in logs[link].items()]
            found[link] = _Series(tuple(logs[link]), np.array(values), math.exp(own[link]))
    return dict(sorted(found.items()))


def _common(logs: Mapping[Link, Mapping[int, float]], own: Mapping[Link, float]) -> dict[int, float]:
    """Return, for each step, the lower median of how far links are from their ``own`` level."""
    steps = sorted({step for link in own for step in logs[link]})
    return {
        step: _lower(logs[link][step] - level for link, level in own.items() if step in logs[link])
        for step in steps
    }


def _has_risen(common: Floats) -> bool:
    return _raised(common - np.quantile(common, 0.25), noise([common])) is not None


def _raised(values: Floats, noise: float) -> LevelShift | None:
    return raised(values, noise, max(_LEAST, _CLEAR * noise))


def _lower(values: Iterable[float]) -> float:
    """Return the lower median."""
    there = sorted(values)
    return there[(len(there) - 1) // 2]


def _causes(
    slow: Mapping[Link, float], measured: Collection[Link], nodes: Mapping[int, int]
) -> list[LinkVerdict]:
    """Return few causes that explain all ``slow`` links, the largest first.

    A cause with several links counts only if all of its measured links are slow.
    """
    left, found = set(slow), list[LinkVerdict]()
    slow_pairs = {frozenset(link) for link in slow}
    for kind, pairs, workers, its_nodes in _suspects({frozenset(link) for link in measured}, nodes):
        links = tuple(sorted(link for link in left if frozenset(link) in pairs))
        if pairs <= slow_pairs and len({frozenset(link) for link in links}) > (kind == SLOW_NETWORK):
            factor = float(np.median([slow[link] for link in links]))
            whose = tuple(sorted(workers or set().union(*pairs)))
            found.append(
                LinkVerdict(
                    kind=kind, links=links, workers=whose, nodes=its_nodes, factor=factor, evidence=""
                )
            )
            left.difference_update(links)
    return found


def _suspects(
    pairs: Collection[_Pair], nodes: Mapping[int, int]
) -> Iterator[tuple[str, set[_Pair], Collection[int], tuple[int, ...]]]:
    """Yield possible causes as (kind, pairs of workers, worker or workers concerned, nodes), the largest first.

    These are: the network between all nodes, if no node is at an end of all its links; a node with links to several
    others; a worker; what lies between two nodes, of which neither can be told to be the cause; and each link.
    """
    on = {pair: {nodes[worker] for worker in pair} for pair in sorted(pairs, key=sorted)}
    between = {pair for pair in on if len(on[pair]) == 2}
    if between and not set.intersection(*(on[pair] for pair in between)):
        yield SLOW_NETWORK, between, (), tuple(sorted(set().union(*(on[pair] for pair in between))))
    for node in sorted(set().union(*(on[pair] for pair in between))):
        own = {pair for pair in between if node in on[pair]}
        ends = {worker for pair in own for worker in pair if nodes[worker] == node}
        if len(set().union(*(on[pair] for pair in own))) > 2 and len(ends) > 1:
            yield SLOW_NETWORK, own, ends, (node,)
    for worker in sorted(set().union(*pairs)):
        yield SLOW_NETWORK, {pair for pair in on if worker in pair}, (worker,), ()
    for both in sorted({tuple(sorted(on[pair])) for pair in between}):
        yield SLOW_NETWORK, {pair for pair in between if tuple(sorted(on[pair])) == both}, (), both
    for pair in on:
        yield SLOW_LINK, {pair}, (), ()


def _causes_of_sums(
    slow: Mapping[Link, float], measured: Collection[Link], nodes: Mapping[int, int]
) -> list[LinkVerdict]:
    """Return the node that takes part in all ``slow`` sums and in no other as their cause; or each sum by itself."""
    on = {workers: {nodes[worker] for worker in workers} for workers in measured}
    elsewhere = set().union(*(on[workers] for workers in measured if workers not in slow))
    shared = set.intersection(*(on[workers] for workers in slow)) - elsewhere if slow else set()
    groups, its_nodes = [[workers] for workers in slow], tuple[int, ...]()
    if len(slow) > 1 and len(shared) == 1:
        groups, its_nodes = [[*slow]], (*shared,)
    return [
        LinkVerdict(
            kind=SLOW_SUMS,
            links=tuple(sorted(links)),
            workers=tuple(
                sorted({one for of in links for one in of if not its_nodes or nodes[one] in its_nodes})
            ),
            nodes=its_nodes,
            factor=float(np.median([slow[workers] for workers in links])),
            evidence="",
        )
        for links in groups
    ]


def _with_evidence(
    verdict: LinkVerdict, since: Mapping[Link, int], series: Mapping[Link, _Series]
) -> LinkVerdict:
    usual_s = float(np.median([series[link].usual_s for link in verdict.links]))
    count, is_sum = len(verdict.links), verdict.kind == SLOW_SUMS
    began = min(since[link] for link in verdict.links)
    of_sums = "a sum takes" if count == 1 else f"{count} sums take"
    which = of_sums if is_sum else "a message takes" if count < 3 else f"{count} of its links take"
    return replace(
        verdict,
        since=began,
        evidence=(
            f"{which} {verdict.factor:.2f} times as long as others of the kind ({1e3 * usual_s:.3g} ms), since step "
            f"{began}; false alarms are at least {FALSE_ALARM_STEPS:.0e} measured steps apart"
        ),
    )
