"""The faults that were asked for and have not struck, by the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from odyssey_megatron.faults import texts_of
from odyssey_megatron.metrics.timeline import JournalEvent

STRIKES = ("injected", "slowed", "link_slowed")
"""The events by which a rank notes that faults strike; ``faults`` are their numbers."""
LOOKED_AT = (*STRIKES, "rank_started")


def not_struck(events: Iterable[JournalEvent], inject: str) -> dict[int, str]:
    """Return the faults in ``inject``, a value of ``--odyssey-inject``, that none of a job's ``events`` is about.

    By their numbers there, which count from 0, as they were written.
    """
    struck = {number for event in events if event["event"] in STRIKES for number in event.get("faults", ())}
    return {number: text for number, text in enumerate(texts_of(inject)) if number not in struck}


def not_struck_line(events: Iterable[JournalEvent], faults: Sequence[str]) -> str:
    """Return what people are told about ``faults`` that have not struck, by a job's events named ``LOOKED_AT``; "" if
    there are none.
    """
    if not faults:
        return ""
    return (
        f"--odyssey-inject: the journal has no record that {len(faults)} fault(s) struck, so this job does not show "
        "that it survives them: " + "; ".join(faults) + _of_first_processes(events, faults)
    )


def _of_first_processes(events: Iterable[JournalEvent], faults: Sequence[str]) -> str:
    processes = Counter(str(event["target"]) for event in events if event["event"] == "rank_started")
    found = set[str]()
    for text in faults:
        parts = (item.partition("=") for item in text.split(","))
        given = {key.strip(): value.strip() for key, _, value in parts}
        if "incarnation" not in given and processes[given.get("rank", "")] > 1:
            found.add(given["rank"])
    if not found:
        return ""
    return (
        f". Rank(s) {', '.join(sorted(found, key=int))} had later processes, which a fault strikes only where it names "
        "them: incarnation=1 is the second one"
    )
