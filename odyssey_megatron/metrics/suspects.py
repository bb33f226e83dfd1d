"""Which nodes to leave out of the next job, and the evidence against each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odyssey_megatron.errors import ENDS_OF_JOB, EXIT_FENCED
from odyssey_megatron.metrics.records import LINK_KINDS, SLOW_LINK, SLOW_SUMS
from odyssey_megatron.metrics.recoveries import named, ranks_of
from odyssey_megatron.metrics.standing import nodes_of
from odyssey_megatron.metrics.timeline import JournalEvent
from odyssey_megatron.names import step_name

_DEATHS = 2
"""The number of incidents from which on a node is a lemon; a single death may have any cause. Source: Meta's
RSC study, arXiv 2410.21680, where few nodes have most failures.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A node that some evidence is against."""

    node: str
    is_to_exclude: bool
    evidence: tuple[str, ...]


class _Evidence:
    """The evidence against each node."""

    def __init__(self) -> None:
        self.against: dict[str, list[str]] = {}
        self.incidents: dict[str, int] = {}
        self.certain: set[str] = set()

    def add(self, node: str, why: str, *, incident: bool = False, certain: bool = False) -> None:
        self.against.setdefault(node, []).append(why)
        self.incidents[node] = self.incidents.get(node, 0) + incident
        self.certain |= {node} if certain else set()


def suspects(events: Sequence[JournalEvent]) -> tuple[Suspect, ...]:
    """Return the suspects, those to exclude first.

    A node is to be excluded if it was lost, computed wrong numbers, or has a slow rank or network now; or if
    in two incidents its ranks died, or were so slow that they were replaced. Injected deaths do not count.
    """
    found, nodes = _Evidence(), nodes_of(events)
    _incidents(events, found)
    for event in _once_each(named(events, "left_out")):
        node = event.get("host") or nodes.get(event["target"], "?")
        why = (
            f"rank {event['target']} had wrong numbers in {step_name(event['step'])}: {event.get('why', '')}"
        )
        found.add(node, why, certain=True)
    _slowness(events, nodes, found)
    judged = [
        Suspect(
            node=node,
            is_to_exclude=node in found.certain or found.incidents[node] >= _DEATHS,
            evidence=tuple(evidence),
        )
        for node, evidence in found.against.items()
    ]
    return tuple(sorted(judged, key=lambda one: (not one.is_to_exclude, -len(one.evidence), one.node)))


def _incidents(events: Sequence[JournalEvent], found: _Evidence) -> None:
    """Collect deaths and replacements, on the nodes where they were: a rank's later processes may be elsewhere."""
    injected = set[int]()
    nodes = nodes_of([*reversed(named(events, "rank_started"))])  # those of each rank's first process
    for event in events:
        if event["event"] == "rank_started":
            nodes |= nodes_of([event])
            injected.discard(event["target"])  # whatever its next process dies of
        elif event["event"] == "injected":
            injected.add(event["rank"])
        elif event["event"] == "failure_detected":
            _death(event, nodes, injected, found)
        elif event["event"] in ("replaced", "set_aside"):
            listed = ", ".join(map(str, event["slow_ranks"]))
            what = event["event"].replace("_", " ")
            why = f"rank(s) {listed} {what}: being slow had cost {event['cost_s']:.0f} s of training"
            for node in sorted({nodes.get(rank, "?") for rank in event["slow_ranks"]}):
                found.add(node, why, incident=True)


def codes_of(event: JournalEvent) -> list[Any]:
    """Return the exit code of each rank that a ``failure_detected`` names."""
    codes = event.get("code")
    return codes if isinstance(codes, list) else [codes] * len(ranks_of(event["dead"]))


def ended_with_the_job(events: Sequence[JournalEvent]) -> set[int]:
    """Return the ranks that were found dead, but had ended as the job does."""
    deaths = named(events, "failure_detected")
    return {
        rank
        for event in deaths
        for rank, code in zip(ranks_of(event["dead"]), codes_of(event), strict=False)
        if code in ENDS_OF_JOB
    }


def _death(
    event: JournalEvent, nodes: Mapping[int, str], injected: Collection[int], found: _Evidence
) -> None:
    """Add a death to the evidence against the nodes of its ranks.

    Not counted are ranks that went with the rest of their cell, to make room for another rank, because their node was
    asked to leave, or with the job.
    """
    dead, codes = ranks_of(event["dead"]), codes_of(event)
    causes = event.get("causes") or [event.get("cause", "")] * len(dead)
    hit: dict[str, dict[int, str]] = {}
    for rank, cause, code in zip(dead, causes, codes, strict=False):
        # The event ``left_out`` names the corrupt ones, with the reason.
        if cause not in ("cell", "corrupt", "moved") and code != EXIT_FENCED and code not in ENDS_OF_JOB:
            hit.setdefault(nodes.get(rank, "?"), {})[rank] = cause
    for node, ranks in hit.items():
        asked = not ranks.keys().isdisjoint(injected)
        cause = ",".join(sorted({*ranks.values()}))
        lost = f"rank(s) {', '.join(map(str, ranks))} lost in generation {event['generation']}"
        why = f"{lost}: {cause}{' (injected)' * asked}"
        found.add(node, why, incident=not asked, certain=cause == "node" and not asked)


def _slowness(events: Sequence[JournalEvent], nodes: Mapping[int, str], found: _Evidence) -> None:
    for rank, why in slow_ranks(events).items():
        found.add(nodes.get(rank, "?"), f"rank {rank} is slow: it {why}", certain=True)
    for kind, whose, why in slow_links(events):
        ends = {nodes.get(rank, "?") for rank in whose}
        # Of a link, either end may be at fault.
        certain = kind != SLOW_LINK and len(ends) == 1
        for node in sorted(ends) if kind != SLOW_SUMS or len(ends) == 1 else ():
            found.add(node, f"{kind} of rank(s) {', '.join(map(str, whose))}: {why}", certain=certain)


def slow_ranks(events: Sequence[JournalEvent]) -> dict[int, str]:
    """Return the ranks that are slow now, with the evidence."""
    found = ((whose, why) for kind, whose, why in _slow_now(events) if kind not in LINK_KINDS)
    return {rank: why for whose, why in found for rank in whose}


def slow_links(events: Sequence[JournalEvent]) -> list[tuple[str, tuple[int, ...], str]]:
    """Return (kind, ranks, evidence) of links, networks and sums that are slow now."""
    return [one for one in _slow_now(events) if one[0] in LINK_KINDS]


def _slow_now(events: Sequence[JournalEvent]) -> list[tuple[str, tuple[int, ...], str]]:
    """Return what is slow now, each finding as it was told: a rank may be slow though its node no longer is."""
    found: dict[tuple[str, tuple[int, ...]], str] = {}
    for event in named(events, "slowness"):
        key = event["kind"], tuple(event.get("slow_ranks", ()))
        found.pop(key, None)
        if event["speed"] < 1.0:
            found[key] = event.get("why", "")
    return [(*key, why) for key, why in found.items()]


def _once_each(events: Sequence[JournalEvent]) -> list[JournalEvent]:
    """Return one event of each rank and generation, as all ranks that stay write the same."""
    return list({(event["target"], event["generation"]): event for event in events}.values())
