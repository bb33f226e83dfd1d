"""Megatron's progress log, in a job whose number of ranks changes.

Megatron measures throughput per GPU since a "Starting job" line with the current number of ranks, and stops if there is
none. Then it is measured since the job's start. The log lies with the checkpoints: where these cannot be written,
neither can the log, and neither ends the job.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from odyssey_megatron.mcore.loop.joining import Start


class ProgressLog:
    """Replaces Megatron's appending to the log, and its reading."""

    def __init__(self, *, joins: Callable[[], bool], not_saved: Callable[[], str]):
        """
        Args:
            joins: whether this process is starting, in a job that has started long ago.
            not_saved: why the last checkpoint is missing, if it is; the same on all ranks.
        """
        self._joins, self._not_saved = joins, not_saved
        self._was_lost = False

    def append(self, original: Any, *given: Any, **named: Any) -> None:
        if self._joins() or (
            self._not_saved() and any(str(one).startswith("Saved checkpoint") for one in given)
        ):
            return
        with self._or_lost():
            original(*given, **named)

    def start_time(self, original: Any) -> Any:
        from megatron.training import get_args, training

        try:
            return original()
        except (OSError, AssertionError, ValueError, IndexError):
            # No job began with as many ranks as live now; or the log is gone, or has a truncated line.
            began = datetime.fromtimestamp(training._TRAIN_START_TIME)
            return began, get_args().num_floating_point_operations_so_far  # as in ``since_start``

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


@contextlib.contextmanager
def since_start(start: Start, launched: int) -> Iterator[None]:
    """In the body Megatron measures the job's throughput from its ``start`` on, also in a process that has joined
    since, and per GPU of the ``launched`` ones: it divides by the time and by the number of living ranks.
    """
    from megatron.training import get_args, training

    args, now_s = get_args(), time.time()
    before = training._TRAIN_START_TIME, args.num_floating_point_operations_so_far
    training._TRAIN_START_TIME = now_s - (now_s - start.began_s) * launched / args.world_size
    args.num_floating_point_operations_so_far = start.floating_point_operations
    try:
        yield
    finally:
        training._TRAIN_START_TIME, args.num_floating_point_operations_so_far = before
