"""Changes of plan between two steps, out of a journal: ranks that came back, layers that moved behind a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odyssey_megatron.metrics.recoveries import named, ranks_of
from odyssey_megatron.metrics.timeline import JournalEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A generation that began because it had been offered. Durations are those of the slowest rank that
    trained before.
    """

    generation: int
    step: int
    """The generation's first step."""
    why: str
    policy: str
    plan_hash: str
    joined: tuple[int, ...]
    """The ranks that came back with this generation."""
    stall_s: float
    """The time from the end of the step before to the generation's first instruction."""


def switches(events: Sequence[JournalEvent]) -> tuple[Switch, ...]:
    """Return the switches in the order of their generations."""
    decided = {event["generation"]: event for event in named(events, "decision")}
    began = {event["generation"]: set(event["members"]) for event in named(events, "generation_started")}
    entered: dict[int, list[JournalEvent]] = {}
    for event in named(events, "switched"):
        entered.setdefault(event["generation"], []).append(event)
    found = []
    for generation, ranks in sorted(entered.items()):
        before = max((one for one in began if one < generation), default=generation)
        joined = began.get(generation, set()) - began.get(before, set())
        stalls = [
            event["groups_s"] + event["agree_s"] + event["transfer_s"]
            for event in ranks
            if event["rank"] not in joined
        ]
        found.append(
            Switch(
                generation=generation,
                step=max(event["step"] for event in ranks),
                why=decided.get(generation, {}).get("why", ""),
                policy=ranks[0]["policy"],
                plan_hash=ranks[0]["plan_hash"],
                joined=ranks_of(sorted(joined)),
                stall_s=max(stalls, default=0.0),
            )
        )
    return tuple(found)
