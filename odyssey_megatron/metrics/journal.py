"""The journal: one JSON object a line, one file a process, readable while the job runs and after it died."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odyssey_megatron.metrics.outlet import Lines, Outlet, say
from odyssey_megatron.metrics.records import CLOCK_READINGS, EVENTS, SCHEMA_VERSION, STALLS
from odyssey_megatron.names import step_name

_ECHO_WIDTH = 120


class Journal:
    """Appends events of one process to ``run_dir/journal/<source>.jsonl``.

    A process killed at any moment leaves whole lines only, and all of them while the folder can be written to. When it
    cannot, the process goes on (:class:`Outlet`).
    """

    def __init__(self, run_dir: str | Path, *, source: str, rank: int = -1):
        path = Path(run_dir) / "journal" / f"{source}.jsonl"
        self._source, self._rank = source, rank
        self._outlet = Outlet(
            Lines(path).write,
            name=f"the journal {path}",
            resumed=lambda lost: self.event("lines_lost", count=lost),
        )

    def event(
        self, name: str, *, generation: int = -1, step: int = -1, echo: bool = False, **values: Any
    ) -> None:
        """Writes one event; with ``echo`` also one line for people on stderr.

        Raises:
            KeyError: the event or one of its fields is not in ``records.EVENTS``.
        """
        unknown = set(values) - set(EVENTS[name])
        if unknown:
            raise KeyError(f"event {name} has no field(s) {sorted(unknown)}")
        line = {
            "schema_version": SCHEMA_VERSION,
            "event": name,
            "t_s": time.monotonic(),
            "wall_s": time.time(),
            "source": self._source,
            "generation": generation,
            "step": step,
            "rank": self._rank,
            **values,
        }
        text = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        self._outlet.put(text, len(text))
        if echo:
            say(_one_line(name, generation, step, self._rank, values))

    def flush(self, limit_s: float) -> bool:
        """Whether all events are written within ``limit_s``."""
        return self._outlet.flush(limit_s)

    def close(self) -> None:
        """Writes what waits, within a limit; says how much is lost."""
        self._outlet.close()


def _one_line(name: str, generation: int, step: int, rank: int, values: dict[str, Any]) -> str:
    where = " ".join(
        text
        for text, value in (
            (f"gen={generation}", generation),
            (step_name(step), step),
            (f"rank={rank}", rank),
        )
        if value >= 0
    )
    if stalled := [value for key in STALLS.get(name, ()) if (value := values.get(key)) is not None]:
        values = {"stall_s": sum(stalled), **values}
    shown = " ".join(
        f"{key}={_short(value)}"
        for key, value in values.items()
        if key not in CLOCK_READINGS and not isinstance(value, dict) and len(_short(value)) <= _ECHO_WIDTH
    )
    return f"[odyssey {where}]".replace(" ]", "]") + f" event={name} {shown}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(_short, value)) or "-"
    return str(value)


def read_journal(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """All events of a run, in order of ``wall_s``. A torn last line (power loss) is left out.

    Raises:
        ValueError: the journal was written by a newer, incompatible version.
    """
    events = []
    for path in sorted((Path(run_dir) / "journal").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if event.get("schema_version", 0) > SCHEMA_VERSION:
                raise ValueError(
                    f"{path} has schema_version {event['schema_version']}, this odyssey reads up to "
                    f"{SCHEMA_VERSION}: use the version that wrote it."
                )
            events.append(event)
    return iter(sorted(events, key=lambda event: event["wall_s"]))
