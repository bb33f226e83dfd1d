"""Recoveries out of a journal: what each one cost, from the failure to the first instruction after it.

Times are compared on the job's one clock, ``at_s`` (``timeline.py``). A monotonic time converts to it exactly
at the moment of its line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from odyssey_megatron.metrics.commits import NO_COMMITS, Commits
from odyssey_megatron.metrics.timeline import JournalEvent, Times, known


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord:
    """One generation after the first. Durations are those of the slowest surviving rank; None: not in the journal."""

    generation: int
    step: int
    dead: tuple[int, ...]
    cause: str
    policy: str
    plan_hash: str
    outcome: str
    """What became of the interrupted step: ``resume``, ``redo`` or ``finish``; or ``superseded``: the next
    failure came before this recovery was complete; or ``unfinished``: so far, or until the job ended, nobody has gone
    on.
    """
    failed_wall_s: float
    """The time when the fault was injected, otherwise when it was detected; by the first agent's clock. If the
    coordinator stood still before it was detected: when that began, or when the last step was committed or the recovery
    before was complete, if that was later.
    """
    detect_s: float | None
    """Only where the fault was injected: the time from then until the agent noticed."""
    decide_s: float | None
    abort_s: float | None
    agree_s: float | None
    groups_s: float | None
    transfer_s: float | None
    redo_s: float | None
    """The time of the interrupted step, from when it went on or began anew until it was committed: training,
    not stall.
    """
    eager_forwards: int
    """Number of the dead workers' forwards that others had run ahead, so that they were not done again."""
    in_groups_s: float | None
    """The time from the failure until the last survivor was in all its new groups."""
    stall_s: float | None
    """The time from the failure (of the earliest superseded recovery, if any) to the last survivor's next
    instruction.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """The reason why a generation has its plan. ``candidates`` are ``plan.sending.generation.CandidateRow`` as JSON."""

    generation: int
    dead: tuple[int, ...]
    why: str
    policy: str
    plan_hash: str
    candidates: tuple[dict[str, Any], ...]


def on_one_clock(event: JournalEvent, monotonic_s: float) -> float:
    """Convert a monotonic time of the process that wrote ``event`` to ``at_s``."""
    return float(monotonic_s + event["at_s"] - event["t_s"])


def ranks_of(value: Any) -> tuple[int, ...]:
    """Return the ranks of a ``dead`` field, which holds one rank or several."""
    return tuple(sorted(value)) if isinstance(value, (list, tuple)) else (int(value),)


def named(events: Iterable[JournalEvent], name: str) -> list[JournalEvent]:
    return [event for event in events if event["event"] == name]


def median(values: Iterable[float]) -> float | None:
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


_Told = Mapping[str, list[JournalEvent]]
_TOLD = (
    "decision",
    "generation_started",
    "failure_detected",
    "injected",
    "recovered",
    "redone",
    "stood_still",
)
"""The events that tell of recoveries."""
_NOTICED_WITHIN_S = 1.0
"""The time after a pause of the coordinator within which it has noticed what failed during the pause."""


def decisions(events: Sequence[JournalEvent]) -> tuple[DecisionRecord, ...]:
    """Return all decisions, by generation; the first is the plan that the job starts with."""
    found = [
        DecisionRecord(
            generation=event["generation"],
            dead=ranks_of(event.get("dead", ())),
            why=event.get("why", ""),
            policy=event.get("policy", ""),
            plan_hash=event.get("plan_hash", ""),
            candidates=tuple(event.get("candidates") or ()),
        )
        for event in named(events, "decision")
    ]
    return tuple(sorted(found, key=lambda decision: decision.generation))


def recoveries(events: Sequence[JournalEvent], older: Commits = NO_COMMITS) -> tuple[RecoveryRecord, ...]:
    """Return one row for each generation after the first that a failure began.

    Args:
        older: Steps before the ones in ``events`` (``follow.Follower``).
    """
    # Collected once, as a long job has a million steps.
    told = {name: named(events, name) for name in _TOLD}
    commits = older.and_of(events) if told["stood_still"] else older
    committed_s = np.concatenate([commits.first_s, commits.at_s])
    taken = (
        event for event in told["decision"] if not event.get("planned") and event.get("why") != "observed"
    )
    decided = {event["generation"]: event for event in taken}
    recovered, redone = (_by_generation(told[name]) for name in ("recovered", "redone"))
    generations = sorted(set(decided) | set(recovered))
    began = (*told["decision"], *told["generation_started"])
    first = min((event["generation"] for event in began), default=0)
    rows = []
    waiting_since: float | None = None  # when the failure of a superseded recovery was
    complete_s = -math.inf  # when the last recovery that was not superseded was complete
    for generation in generations:
        if generation <= first:
            continue
        row = _recovery(
            told,
            generation,
            decided.get(generation),
            recovered.get(generation, []),
            redone.get(generation, []),
            waiting_since,
            committed_s,
            complete_s,
        )
        if generation == generations[-1] and generation not in recovered:
            row = replace(row, outcome="unfinished")
        superseded = row.stall_s is None
        waiting_since = (waiting_since or row.failed_wall_s) if superseded else None
        complete_s = _until(recovered.get(generation, []), "resumed_s", 0.0) or complete_s
        rows.append(row)
    return tuple(rows)


def _by_generation(events: Iterable[JournalEvent]) -> dict[int, list[JournalEvent]]:
    found: dict[int, list[JournalEvent]] = {}
    for event in events:
        found.setdefault(event["generation"], []).append(event)
    return found


def _recovery(
    told: _Told,
    generation: int,
    decided: JournalEvent | None,
    recovered: list[JournalEvent],
    redone: list[JournalEvent],
    waiting_since: float | None,
    committed_s: Times,
    complete_s: float,
) -> RecoveryRecord:
    head = recovered[0] if recovered else decided
    assert head is not None, "a generation is known from one of the two"
    dead = ranks_of(head.get("dead", ()))
    noticed, injected = _notices(told, dead, generation), dict[int, JournalEvent]()
    for rank, notice in noticed.items():
        if (own := _injection(told, rank, notice, generation)) is not None:
            injected[rank] = own
    failures = known(event["at_s"] for event in (noticed | injected).values())
    failed = min(failures, default=_decided_at_s(decided or head))
    failed = failed if injected else _failed_at_s(told["stood_still"], failed, committed_s, complete_s)
    since = min(failed, waiting_since) if waiting_since else failed
    return RecoveryRecord(
        generation=generation,
        step=max(event["step"] for event in (head, *injected.values(), *noticed.values())),
        dead=dead,
        cause=", ".join(sorted({str(event.get("cause", "")) for event in noticed.values()})),
        policy=str(head.get("policy", "")),
        plan_hash=str(head.get("plan_hash", "")),
        outcome=str(head.get("outcome", "superseded")) if recovered else "superseded",
        failed_wall_s=failed,
        detect_s=max(
            known(noticed[rank]["at_s"] - injected[rank]["at_s"] for rank in set(injected) & set(noticed)),
            default=None,
        ),
        decide_s=head.get("decide_s"),
        abort_s=_slowest(recovered, "abort_s"),
        agree_s=_slowest(recovered, "agree_s"),
        groups_s=_slowest(recovered, "groups_s"),
        transfer_s=_slowest(recovered, "transfer_s"),
        redo_s=_slowest(redone, "redo_s"),
        eager_forwards=max((one.get("eager_forwards", 0) for one in recovered), default=0),
        in_groups_s=_until(recovered, "in_groups_s", since),
        stall_s=_until(recovered, "resumed_s", since),
    )


def _notices(told: _Told, dead: tuple[int, ...], generation: int) -> dict[int, JournalEvent]:
    """Return the last ``failure_detected`` about each dead rank before ``generation``.

    A rank may have died before, and may die again.
    """
    return {
        rank: event
        for event in told["failure_detected"]
        if event["generation"] < generation
        for rank in ranks_of(event["dead"])
        if rank in dead
    }


def _injection(told: _Told, rank: int, notice: JournalEvent, generation: int) -> JournalEvent | None:
    """Return the injection by which ``rank`` died, before ``generation``; None if its death was not injected.

    It is looked for in the generations since the rank's death before the one that ``notice`` tells of.
    """
    earlier = [
        event["at_s"]
        for event in told["failure_detected"]
        if rank in ranks_of(event["dead"]) and event["at_s"] < notice["at_s"]
    ]
    decided = [event["generation"] for event in told["decision"] if earlier and event["at_s"] >= earlier[-1]]
    first = min(decided, default=0)
    ours = [event for event in told["injected"] if event["rank"] == rank]
    return next((event for event in reversed(ours) if first <= event["generation"] < generation), None)


def _decided_at_s(event: JournalEvent) -> float:
    """Return when deciding began. It stands for the failure where nobody has died, so that nothing was noticed."""
    return float(event["at_s"] - event.get("decide_s", 0.0))


def _failed_at_s(
    pauses: Sequence[JournalEvent], noticed_s: float, committed_s: Times, complete_s: float
) -> float:
    """Return when a failure was that was noticed at ``noticed_s``: earlier, if the coordinator stood still before.

    Training went on until the last of the times when steps were committed, ``committed_s``, and again once the
    recovery before was complete, at ``complete_s``.
    """
    for pause in pauses:
        began_s = pause["at_s"] - pause["lasted_s"]
        if began_s < noticed_s < pause["at_s"] + _NOTICED_WITHIN_S:
            last_s = committed_s[committed_s < noticed_s].max(initial=began_s)  # no NaN is less
            return min(noticed_s, max(float(last_s), complete_s))
    return noticed_s


def _slowest(recovered: list[JournalEvent], field: str) -> float | None:
    return max((event[field] for event in recovered if event.get(field) is not None), default=None)


def _until(recovered: list[JournalEvent], field: str, since_s: float) -> float | None:
    ends = known(on_one_clock(event, event[field]) for event in recovered if event.get(field))
    return max(ends) - since_s if ends else None
