"""The journal of a running job, read as it grows: each line once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.journal import NoEvent, event_of, files_of
from odyssey_megatron.metrics.timeline import JournalEvent, last_job

_NOT_SHOWN = tuple(f'"event":"{name}"'.encode() for name in ("samples", "trace", "weights"))
"""Events that make up most of a journal's bytes. Only the report reads them."""
_HEAD_BYTES = 64
"""The name of a line's event is within this many bytes from its beginning."""
_AT_ONCE_BYTES = 64 << 20


@dataclass
class _File:
    """How far one process's journal has been read."""

    at: int = 0
    latest_s: float = 0.0
    """The latest time so far; the process's clock may have been set back."""
    events: list[tuple[float, JournalEvent]] = field(default_factory=list)
    known: dict[tuple[object, ...], int] = field(default_factory=dict)
    """The index in ``events`` of an event that is replaced whenever it is written again."""


class Follower:
    """Reads what is new in a run folder's journal.

    Where many ranks say the same, or a line replaces an earlier one, one line is kept.
    """

    def __init__(self, run_dir: str | Path):
        """Raises ConfigError if ``run_dir`` is no run's folder."""
        self.folder = Path(run_dir)
        self._files: dict[str, _File] = {}
        self._steps: set[tuple[object, ...]] = set()
        self._planned: dict[object, list[JournalEvent]] = {}
        """For each job, the decisions that still have their layouts, in the order in which they were made."""
        if not (self.folder / "journal").is_dir():
            raise ConfigError(
                f"{run_dir} has no journal folder, so it is not a run's folder. Give the folder that the job was "
                "started with (--odyssey-run-dir)."
            )

    def events(self) -> list[JournalEvent]:
        """Return the events of the folder's latest job, on one clock (``timeline.last_job``).

        Raises:
            ConfigError: A file cannot be read, or was written by a newer, incompatible version.
        """
        for path in files_of(self.folder):
            file = self._files.setdefault(path.name, _File())
            try:
                with path.open("rb") as stream:
                    if stream.seek(0, 2) < file.at:  # another file under its name
                        self._forget()
                        return self.events()
                    for row in _new_lines(stream, file):
                        if any(one in row[:_HEAD_BYTES] for one in _NOT_SHOWN):
                            continue
                        with suppress(NoEvent):  # the report names it
                            if (event := event_of(row)) is not None:
                                self._keep(file, event)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
            except ValueError as error:
                # Read from the start next time, or the lines behind this one would be missing.
                self._forget()
                raise ConfigError(f"{path}: {error}.") from error
        rows = sorted((one for file in self._files.values() for one in file.events), key=lambda one: one[0])
        return last_job([event for _, event in rows])

    def _forget(self) -> None:
        self._files, self._steps, self._planned = {}, set(), {}

    def _keep(self, file: _File, event: JournalEvent) -> None:
        file.latest_s = max(file.latest_s, event["wall_s"])
        row = file.latest_s, event
        name, job = event["event"], event.get("job")
        if name in ("step_committed", "generation_started"):
            # One for each clock, as clocks are joined by these moments.
            key = name, job, event["generation"], event["step"], event.get("clock")
            if key in self._steps:
                return
            self._steps.add(key)
        if name == "generation_started":
            self._drop_layouts(job, event["generation"])
        if name == "decision":
            event.pop("schedule", None)
            self._planned.setdefault(job, []).append(event)
        if name == "measured":
            if (name, job) in file.known:
                file.events[file.known[name, job]] = row
                return
            file.known[name, job] = len(file.events)
        file.events.append(row)

    def _drop_layouts(self, job: object, generation: int) -> None:
        """Drop the layouts of decisions before a generation that has started, but for the job's first one.

        The first one is looked at again, and no others. Nothing is dropped until the generation's own
        decision has been read, too: the files may show it later than its start.
        """
        planned = self._planned.get(job, [])
        if generation in [one["generation"] for one in planned]:
            for event in [one for one in planned[1:] if one["generation"] < generation]:
                event.pop("layout", None)
                planned.remove(event)


def _new_lines(stream: BinaryIO, file: _File) -> Iterator[bytes]:
    """Yield whole lines; a torn one is looked at again when there is more."""
    stream.seek(file.at)
    while chunk := stream.read(_AT_ONCE_BYTES):
        end = chunk.rfind(b"\n") + 1
        if not end:
            return
        file.at += end
        stream.seek(file.at)
        yield from chunk[:end].splitlines()
