"""The faults that were asked for and have not struck, by the journal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from odyssey_megatron.faults import texts_of
from odyssey_megatron.metrics.timeline import JournalEvent

STRIKES = ("injected", "slowed", "link_slowed")
"""The events by which a rank notes that faults strike; ``faults`` are their numbers."""


def not_struck(events: Iterable[JournalEvent], inject: str) -> dict[int, str]:
    """Return the faults in ``inject``, a value of ``--odyssey-inject``, that none of a job's ``events`` is about.

    By their numbers there, which count from 0, as they were written.
    """
    struck = {number for event in events if event["event"] in STRIKES for number in event.get("faults", ())}
    return {number: text for number, text in enumerate(texts_of(inject)) if number not in struck}


def not_struck_line(faults: Sequence[str]) -> str:
    """Return what people are told about faults that have not struck; "" if there are none."""
    if not faults:
        return ""
    return (
        f"--odyssey-inject: the journal has no record that {len(faults)} fault(s) struck, so this job does not show "
        "that it survives them: " + "; ".join(faults)
    )
