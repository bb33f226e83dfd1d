"""A queue of items that wait to be written, which counts those that are lost."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """Items in order, of which the newest ``kept_bytes`` wait."""

    def __init__(self, kept_bytes: int):
        self.kept_bytes = kept_bytes
        self._waiting: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self.put_so_far = 0
        self.settled = 0
        """The number of items, from the first one on, that have been written, or lost."""
        self.lost = 0
        """The number of items lost since somebody was told of it."""

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    @property
    def first(self) -> T:
        """The item to be written next. It stays until it is :meth:`written`."""
        return self._waiting[0][0]

    def put(self, item: T, size_bytes: int) -> None:
        """Append an item, and drop the oldest ones if not all fit; but not the first, a part of which may be
        written.
        """
        self._waiting.append((item, size_bytes))
        self._bytes, self.put_so_far = self._bytes + size_bytes, self.put_so_far + 1
        while self._bytes > self.kept_bytes and len(self._waiting) > 1:
            self._bytes -= self._waiting[1][1]
            del self._waiting[1]
            self.lost, self.settled = self.lost + 1, self.settled + 1

    def written(self) -> None:
        """Remove the first item, which has been written."""
        _, size_bytes = self._waiting.popleft()
        self._bytes, self.settled = self._bytes - size_bytes, self.settled + 1

    @property
    def is_settled(self) -> bool:
        """Whether nothing that was put is waiting."""
        return self.settled == self.put_so_far

    @property
    def missing(self) -> int:
        """The number of items that are lost if nothing more is written."""
        return self.lost + self.put_so_far - self.settled

    def take_lost(self) -> int:
        """Return the number of items lost since the last call."""
        lost, self.lost = self.lost, 0
        return lost
