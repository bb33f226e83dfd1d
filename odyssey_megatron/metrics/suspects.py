"""Which nodes to leave out of the next job, and what speaks against each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odyssey_megatron.metrics.records import LINK_KINDS, SLOW_LINK, SLOW_SUMS
from odyssey_megatron.metrics.recoveries import named, ranks_of
from odyssey_megatron.metrics.standing import nodes_of
from odyssey_megatron.metrics.timeline import JournalEvent
from odyssey_megatron.names import step_name

_DEATHS = 2
"""One death may be anything; from so many incidents on a node is a lemon. Source: Meta's RSC study, arXiv 2410.21680,
where few nodes have most failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A node that something speaks against."""

    node: str
    is_to_exclude: bool
    evidence: tuple[str, ...]


def suspects(events: Sequence[JournalEvent]) -> tuple[Suspect, ...]:
    """Those to exclude first. A node is to be excluded that was lost, computed wrong numbers, has a slow rank or
    network now, or had ranks die in two incidents.
    """
    nodes = nodes_of(events)
    against: dict[str, list[str]] = {}
    incidents: dict[str, int] = {}
    certain: set[str] = set()
    injected = {event["rank"] for event in named(events, "injected")}
    for event in named(events, "failure_detected"):
        if event.get("cause") == "corrupt":
            continue  # ``left_out`` says so with the reason
        hit: dict[str, list[int]] = {}
        for rank in ranks_of(event["dead"]):
            hit.setdefault(nodes.get(rank, "?"), []).append(rank)
        for node, ranks in hit.items():
            cause = event.get("cause", "")
            asked = " (injected)" if injected & set(ranks) else ""
            incidents[node] = incidents.get(node, 0) + 1
            certain |= {node} if cause == "node" else set()
            against.setdefault(node, []).append(
                f"rank(s) {', '.join(map(str, ranks))} lost in generation {event['generation']}: {cause}{asked}"
            )
    for event in _once_each(named(events, "left_out")):
        node = event.get("host") or nodes.get(event["target"], "?")
        certain.add(node)
        against.setdefault(node, []).append(
            f"rank {event['target']} had wrong numbers in {step_name(event['step'])}: {event.get('why', '')}"
        )
    for rank, why in slow_ranks(events).items():
        node = nodes.get(rank, "?")
        certain.add(node)
        against.setdefault(node, []).append(f"rank {rank} is slow: it {why}")
    for kind, whose, why in slow_links(events):
        ends = {nodes.get(rank, "?") for rank in whose}
        if kind != SLOW_LINK and len(ends) == 1:  # of two ends either may be at fault
            certain |= ends
        for node in ends if kind != SLOW_SUMS or len(ends) == 1 else ():
            listed = ", ".join(map(str, whose))
            against.setdefault(node, []).append(f"{kind} of rank(s) {listed}: {why}")
    found = [
        Suspect(
            node=node,
            is_to_exclude=node in certain or incidents.get(node, 0) >= _DEATHS,
            evidence=tuple(evidence),
        )
        for node, evidence in against.items()
    ]
    return tuple(sorted(found, key=lambda one: (not one.is_to_exclude, -len(one.evidence), one.node)))


def slow_ranks(events: Sequence[JournalEvent]) -> dict[int, str]:
    """Those that are slow now, with the evidence."""
    found: dict[int, str] = {}
    for event in named(events, "slowness"):
        for rank in event.get("slow_ranks", ()) if event["kind"] not in LINK_KINDS else ():
            if event["speed"] < 1.0:
                found[rank] = event.get("why", "")
            else:
                found.pop(rank, None)
    return found


def slow_links(events: Sequence[JournalEvent]) -> list[tuple[str, tuple[int, ...], str]]:
    """(kind, ranks, evidence) of those that are slow now."""
    found: dict[tuple[str, tuple[int, ...]], str] = {}
    for event in named(events, "slowness"):
        key = event["kind"], tuple(event.get("slow_ranks", ()))
        if event["kind"] in LINK_KINDS:
            found.pop(key, None)
            if event["speed"] < 1.0:
                found[key] = event.get("why", "")
    return [(*key, why) for key, why in found.items()]


def _once_each(events: Sequence[JournalEvent]) -> list[JournalEvent]:
    """All ranks that stay write the same."""
    return list({(event["target"], event["generation"]): event for event in events}.values())
