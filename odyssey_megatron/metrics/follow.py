"""The journal of a running job, read as it grows: each line once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.commits import NO_COMMITS, Commits, OldReports
from odyssey_megatron.metrics.journal import NoEvent, event_of, files_of
from odyssey_megatron.metrics.timeline import JournalEvent, clocked

_NOT_SHOWN = tuple(f'"event":"{name}"'.encode() for name in ("samples", "step_dealt", "trace", "weights"))
"""Events that make up most of a journal's bytes. Only the report reads them."""
_HEAD_BYTES = 64
"""The name of a line's event is within this many bytes from its beginning."""
_LONGEST_BYTES = 64 << 20
"""The most bytes of a line."""
_WHOLE_STEPS = 256
"""The newest steps of a job whose lines are kept whole, or up to twice as many. More than are shown."""


@dataclass
class _File:
    """How far one process's journal has been read."""

    at: int = 0
    latest_s: float = 0.0
    """The latest time so far; the process's clock may have been set back."""
    events: list[tuple[float, JournalEvent]] = field(default_factory=list)
    known: dict[tuple[object, ...], int] = field(default_factory=dict)
    """The index in ``events`` of an event that is replaced whenever it is written again."""


@dataclass
class _Steps:
    """The committed steps of one job."""

    newest: dict[int, dict[tuple[object, ...], tuple[float, JournalEvent]]] = field(default_factory=dict)
    """For each of the newest steps its reports, one for each generation and clock."""
    old: OldReports = field(default_factory=OldReports)
    old_until: int = -1
    """The newest of the old steps."""

    def add(self, latest_s: float, event: JournalEvent) -> None:
        if event["step"] <= self.old_until:
            return self.old.add(event)
        reports = self.newest.setdefault(event["step"], {})
        key = event["generation"], event["clock"]  # clocks are not compared before they are joined
        if (there := reports.get(key)) is not None:
            first = min(there, (latest_s, event), key=lambda one: one[1]["t_s"])
            took_s = max(there[1].get("step_s", -1.0), event.get("step_s", -1.0))
            latest_s, event = first[0], first[1] | {"step_s": took_s}
        reports[key] = latest_s, event
        if len(self.newest) > 2 * _WHOLE_STEPS:
            self._age()

    def _age(self) -> None:
        """Keep of all but the newest steps what the sums over all steps need."""
        for step in sorted(self.newest)[:-_WHOLE_STEPS]:
            for _, event in self.newest.pop(step).values():
                self.old.add(event)
            self.old_until = step


class Follower:
    """Reads what is new in a run folder's journal.

    Where many ranks say the same, or a line replaces an earlier one, one line is kept; and of old steps a few numbers,
    so that what is done at each look does not grow with the job.
    """

    def __init__(self, run_dir: str | Path):
        """Raises ConfigError if ``run_dir`` is no run's folder."""
        self.folder = Path(run_dir)
        self._files: dict[str, _File] = {}
        self._started: set[tuple[object, ...]] = set()
        self._steps: dict[object, _Steps] = {}
        self._planned: dict[object, list[JournalEvent]] = {}
        """For each job, the decisions that still have their layouts, in the order in which they were made."""
        if not (self.folder / "journal").is_dir():
            raise ConfigError(
                f"{run_dir} has no journal folder, so it is not a run's folder. Give the folder that the job was "
                "started with (--odyssey-run-dir)."
            )

    def events(self) -> list[JournalEvent]:
        """Return what is kept whole of the folder's latest job, on one clock (``timeline.last_job``).

        Raises ConfigError as :meth:`look`.
        """
        return self.look()[0]

    def look(self) -> tuple[list[JournalEvent], Commits]:
        """Return the events, and the older steps, whose lines are not among the events.

        Raises:
            ConfigError: A file cannot be read, or was written by a newer, incompatible version.
        """
        for path in files_of(self.folder):
            file = self._files.setdefault(path.name, _File())
            try:
                with path.open("rb") as stream:
                    if stream.seek(0, 2) < file.at:  # another file under its name
                        self._forget()
                        return self.look()
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
        whole = [one for file in self._files.values() for one in file.events]
        whole += [
            row for job in self._steps.values() for reports in job.newest.values() for row in reports.values()
        ]
        events, clock = clocked([event for _, event in sorted(whole, key=lambda one: one[0])])
        if clock is None or clock.job not in self._steps:
            return events, NO_COMMITS
        return events, self._steps[clock.job].old.commits(clock)

    def _forget(self) -> None:
        self._files, self._started, self._steps, self._planned = {}, set(), {}, {}

    def _keep(self, file: _File, event: JournalEvent) -> None:
        file.latest_s = max(file.latest_s, event["wall_s"])
        row = file.latest_s, event
        name, job = event["event"], event.get("job")
        if name == "step_committed" and "job" in event and "clock" in event:
            self._steps.setdefault(job, _Steps()).add(*row)
            return
        if name == "generation_started":
            # One for each clock, as clocks are joined by these moments.
            key = job, event["generation"], event["step"], event.get("clock")
            if key in self._started:
                return
            self._started.add(key)
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
    while (row := stream.readline(_LONGEST_BYTES)).endswith(b"\n"):
        file.at += len(row)
        yield row
