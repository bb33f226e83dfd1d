"""The journal: one JSON object on each line, one file for each process, readable while the job runs and after
it died.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from odyssey_megatron.codec import from_jsonable, parsed
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import read_bytes
from odyssey_megatron.metrics.lines import Lines
from odyssey_megatron.metrics.outlet import Outlet, say
from odyssey_megatron.metrics.records import (
    CLOCK_READINGS,
    EVENTS,
    OF_AGENTS,
    SCHEMA_VERSION,
    STALLS,
    JournalLine,
)
from odyssey_megatron.names import step_name

_ECHO_WIDTH = 120


class Journal:
    """Appends events of one process to ``run_dir/journal/<source>.jsonl``.

    A process that is killed at any moment leaves whole lines only, and all of them as long as the folder can
    be written to. When it cannot, the process goes on (:class:`Outlet`).
    """

    def __init__(self, run_dir: str | Path, *, source: str, rank: int = -1, job: str = ""):
        path = file_of(run_dir, source)
        self._source, self._rank, self._job, self._clock = source, rank, job, clock()
        self._outlet = Outlet(
            Lines(path).write,
            name=f"the journal {path}",
            resumed=lambda lost: self.event("lines_lost", count=lost),
        )

    def event(
        self, name: str, *, generation: int = -1, step: int = -1, echo: bool = False, **values: Any
    ) -> None:
        """Write one event; with ``echo`` also one line for people on stderr.

        Raises:
            KeyError: The event, or one of its fields, is not in ``records.EVENTS``.
        """
        unknown = set(values) - set(EVENTS[name])
        if unknown:
            raise KeyError(f"event {name} has no field(s) {sorted(unknown)}")
        line = {
            "schema_version": SCHEMA_VERSION,
            "event": name,
            "t_s": time.monotonic(),
            "wall_s": time.time(),
            "clock": self._clock,
            "job": self._job,
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
        """Return whether all events are written within ``limit_s``."""
        return self._outlet.flush(limit_s)

    def close(self) -> None:
        """Write what waits, within a limit, and say how much is lost."""
        self._outlet.close()


def host_name() -> str:
    """Return the name of this process's machine as the batch system knows it, so that it can be told to leave the
    machine out. Slurm's NodeName need not be the host's own name, which may be longer, or a container's.
    """
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def clock() -> str:
    """Return a name of this process's monotonic clock: it differs between processes whose ``t_s`` cannot be
    compared.
    """
    names = [socket.gethostname()]
    with contextlib.suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with contextlib.suppress(OSError):
        names.append(os.readlink("/proc/self/ns/time"))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


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


MAX_JOURNAL_BYTES = 8 * 2**30
"""Size limit for the journal of one process; more would not fit into the memory of most machines."""


def file_of(run_dir: str | Path, source: str) -> Path:
    """Return where the lines of one process are."""
    return Path(run_dir) / "journal" / f"{source}.jsonl"


_OF_RANK = re.compile(r"rank\d+", re.ASCII)
"""The source of a rank's lines, by which its file is named."""


def files_of(run_dir: str | Path, only: Sequence[str] = ()) -> list[Path]:
    """The journal's, one of each process; none if there is no journal. Raises ConfigError.

    Args:
        only: Names of events. Files that have none of them may be left out; empty: no file is.
    """
    folder = Path(run_dir) / "journal"
    agents_alone = bool(only) and OF_AGENTS.keys() >= {*only}
    try:
        return sorted(
            path
            for path in folder.iterdir()
            if path.suffix == ".jsonl" and not (agents_alone and _OF_RANK.fullmatch(path.stem))
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}).") from error


class NoEvent(ValueError):
    """A line is whole, and none of a journal."""


def read_journal(
    run_dir: str | Path, left_out: Callable[[str], None] = lambda said: None, *, only: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Return all events of a folder: those of one process in its order, otherwise in order of ``wall_s``.

    Lines that are not JSON are left out: a line may be torn if the process was killed, or if the disk was
    full or lost its power. So are lines that are not events.

    Args:
        left_out: Is told of lines that are not events, one sentence for each file that has some.
        only: The names of the events that are returned, so that other lines are not parsed, nor files read that have
            none of them; empty: all.

    Raises:
        ConfigError: A file cannot be read, or was written by a newer, incompatible version.
    """
    events: list[tuple[float, dict[str, Any]]] = []
    wanted = [f'"{name}"'.encode() for name in only]
    for path in files_of(run_dir, only):
        try:
            rows = io.BytesIO(read_bytes(path, MAX_JOURNAL_BYTES))
        except ValueError as error:
            raise ConfigError(
                f"{path}: {error}. Take it out of the folder, which is for journals."
            ) from error
        latest_s = 0.0
        bad: list[tuple[int, NoEvent]] = []
        for number, row in enumerate(rows, 1):
            if wanted and not any(name in row for name in wanted):
                continue
            try:
                event = event_of(row)
            except NoEvent as error:
                bad.append((number, error))
                continue
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}.") from error
            if event is not None and (not only or event["event"] in only):
                latest_s = max(latest_s, event["wall_s"])  # the clock may have been set back
                events.append((latest_s, event))
        if bad:
            more = f" and {len(bad) - 1:,} more" if len(bad) > 1 else ""
            left_out(f"{path}, line {bad[0][0]}{more}: {bad[0][1]}; left out")
    return (event for _, event in sorted(events, key=lambda one: one[0]))


_SAME_ON_MANY_LINES = {"event", "clock", "job", "source"}


def event_of(row: bytes) -> dict[str, Any] | None:
    """Return the event of a line; None if it is torn or empty. Raises NoEvent; ValueError for a newer version's."""
    try:
        event = parsed(row.decode())
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    if isinstance(event, dict):
        version = event.get("schema_version", SCHEMA_VERSION)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise ValueError(
                f"it has schema_version {str(version)[:40]}, and this odyssey reads up to {SCHEMA_VERSION}: use the "
                "version that wrote it"
            )
    try:
        from_jsonable(JournalLine, event)
    except ValueError as error:
        raise NoEvent(f"it is no event of a journal ({error})") from None
    # Of a long journal these texts would be most of the memory.
    checked = {sys.intern(name): value for name, value in event.items()}
    for name in _SAME_ON_MANY_LINES & checked.keys():
        checked[name] = sys.intern(checked[name])
    return checked
