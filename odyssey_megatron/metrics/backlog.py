"""What waits to be written, and is counted where it is lost."""

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
        """How many of these have been written, or lost: the first ones."""
        self.lost = 0
        """Since somebody was told of it."""

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    @property
    def first(self) -> T:
        """What is to be written next. It stays until it is :meth:`written`."""
        return self._waiting[0][0]

    def put(self, item: T, size_bytes: int) -> None:
        """Also lets go of what is too old for all to wait; but not of the first, of which a part may be written."""
        self._waiting.append((item, size_bytes))
        self._bytes, self.put_so_far = self._bytes + size_bytes, self.put_so_far + 1
        while self._bytes > self.kept_bytes and len(self._waiting) > 1:
            self._bytes -= self._waiting[1][1]
            del self._waiting[1]
            self.lost, self.settled = self.lost + 1, self.settled + 1

    def written(self) -> None:
        """The first is."""
        _, size_bytes = self._waiting.popleft()
        self._bytes, self.settled = self._bytes - size_bytes, self.settled + 1

    @property
    def is_settled(self) -> bool:
        """Nothing that was put waits."""
        return self.settled == self.put_so_far

    @property
    def missing(self) -> int:
        """How many are lost if nothing more is written."""
        return self.lost + self.put_so_far - self.settled

    def take_lost(self) -> int:
        """How many were lost since it was last asked."""
        lost, self.lost = self.lost, 0
        return lost
