"""Megatron's progress log, in a job whose number of ranks changes.

Megatron measures throughput per GPU since the last "Starting job" line with the current number of ranks, and stops if
there is none. So when the number changes such a line is written, as after a restart. The log lies with the checkpoints:
where these cannot be written, neither can the log, and neither ends the job.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from odyssey_megatron.rebuild.world import Together
from odyssey_megatron.upstream import compat, seam_table, seams


class ProgressLog:
    """Replaces Megatron's appending to the log, and its reading."""

    def __init__(self, together: Together, *, joins: Callable[[], bool], not_saved: Callable[[], str]):
        """
        Args:
            joins: whether this process is starting, in a job that has started long ago.
            not_saved: why the last checkpoint is missing, if it is; the same on all ranks.
        """
        self._together, self._joins, self._not_saved = together, joins, not_saved
        self._size = 0
        """Number of ranks in the last "Starting job" line that this rank has taken care of."""
        self._began, self._was_lost = datetime.now(), False

    def append(self, original: Any, *given: Any, **named: Any) -> None:
        from megatron.training import get_args

        if self._joins() or (
            self._not_saved() and any(str(one).startswith("Saved checkpoint") for one in given)
        ):
            return
        self._size = self._size or get_args().world_size  # the first line says that the job starts
        with self._or_lost():
            original(*given, **named)

    def start_time(self, original: Any) -> Any:
        from megatron.training import get_args

        args = get_args()

        def work(world: Any) -> None:
            if world.rank() == 0 and world.size() != self._size:
                append = seams.original(seam_table.APPEND_TO_PROGRESS_LOG)
                with self._or_lost():
                    compat.append_to_progress_log(append, args.save, "Starting job")
                self._size = world.size()

        self._together(work)  # nobody reads the log before the line is written
        try:
            return original()
        except (OSError, AssertionError, ValueError, IndexError):  # the log is gone, or has a truncated line
            return self._began, args.num_floating_point_operations_so_far  # what this job began with

    @contextlib.contextmanager
    def _or_lost(self) -> Iterator[None]:
        """Drop what the first rank cannot write in the body, with one message; nothing waits for it."""
        try:
            yield
        except ConnectionError:
            raise
        except OSError as error:
            if not self._was_lost:
                sys.stderr.write(
                    f"[odyssey] the progress log has lost lines, the first of them for: {error}.\n"
                )
            self._was_lost = True
