"""Megatron's progress log, in a job whose number of ranks changes.

Megatron measures throughput per GPU since the last "Starting job" line with as many ranks as there are, and stops if
there is none. So a job of another size begins with such a line, as it would after a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from odyssey_megatron.rebuild.world import Together
from odyssey_megatron.upstream import compat, seam_table, seams


class ProgressLog:
    """Replaces what Megatron appends and reads."""

    def __init__(self, together: Together, *, joins: Callable[[], bool]):
        """``joins``: whether this process is starting, in a job that has started long ago."""
        self._together, self._joins = together, joins
        self._size = 0
        """Ranks, in the last "Starting job" line that this one has seen to."""

    def append(self, original: Any, *given: Any, **named: Any) -> None:
        from megatron.training import get_args

        if self._joins():
            return
        self._size = self._size or get_args().world_size  # the first line says that the job starts
        original(*given, **named)

    def start_time(self, original: Any) -> Any:
        from megatron.training import get_args

        args = get_args()

        def work(world: Any) -> None:
            if world.rank() == 0 and world.size() != self._size:
                append = seams.original(seam_table.APPEND_TO_PROGRESS_LOG)
                compat.append_to_progress_log(append, args.save, "Starting job")
                self._size = world.size()

        self._together(work)  # nobody reads before it is written
        return original()
