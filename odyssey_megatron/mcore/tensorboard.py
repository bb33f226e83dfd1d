"""Megatron's TensorBoard writer on every rank, so that the curves go on when the rank that wrote them has died.

Megatron gives a writer to the last rank. Here all ranks take what the loop logs, which is the same on all of them, and
the last living one writes it to a file. The others keep the newest: a killed rank loses what it had not flushed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

_KEPT = 2
"""Iterations. The last rank flushes one before it begins the next, and nobody is two ahead of it."""


class SurvivingWriter:
    """Implements what Megatron uses of ``SummaryWriter``.

    Args:
        open_file: makes the real writer; called on a rank when it becomes the last.
        note: leaves the number of the iteration whose scalars are in the file for whoever comes next.
        noted: that number, -1 if there is none.
    """

    def __init__(self, open_file: Callable[[], Any], note: Callable[[int], None], noted: Callable[[], int]):
        self._open_file, self._note, self._noted = open_file, note, noted
        self._file: Any = None
        self._iteration = 0
        self._kept: deque[tuple[int, tuple[Any, ...], dict[str, Any]]] = deque()

    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        """As SummaryWriter's: tag, value, and the step that it belongs to."""
        if self._file is not None:
            self._file.add_scalar(*args, **kwargs)
        else:
            self._kept.append((self._iteration, args, kwargs))

    def add_text(self, *args: Any, **kwargs: Any) -> None:
        """Said once, at the start, by the rank that is the last then."""
        if self._file is not None:
            self._file.add_text(*args, **kwargs)

    def hand_over(self) -> None:
        """Another rank is the last one now."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def begin(self, iteration: int) -> None:
        """All that earlier iterations had to log has been logged."""
        if self._file is not None and self._iteration < iteration:
            self._file.flush()
            self._note(self._iteration)
        self._iteration = iteration
        while self._kept and self._kept[0][0] <= iteration - _KEPT:
            self._kept.popleft()

    def become_last(self) -> None:
        """From now on this rank writes, beginning with what its predecessor has not. A second call does nothing."""
        if self._file is not None:
            return
        self._file, noted = self._open_file(), self._noted()
        for iteration, args, kwargs in self._kept:
            if iteration > noted:
                self._file.add_scalar(*args, **kwargs)
        self._kept.clear()
