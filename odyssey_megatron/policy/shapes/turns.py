"""Turns: one thread at a time works with a search, and decisions go before preparation.

What a search knows is shared by decisions and by the thread that works out what the next ones will look up. That takes
seconds, for which a recovery must not wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Preempted(Exception):
    """A thread that goes first is waiting: the work is left, and starts over after it."""


class Turns:
    """Gives threads their turns."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner: int | None = None
        self._yields = False
        self._waiting = 0
        """Number of waiting threads that do not yield."""
        self._own = threading.local()

    def run(self, work: Callable[[], T], *, yields: bool) -> T:
        """Return ``work()``, run while no other thread has the turn. Within other work of this thread it runs at once.

        Args:
            yields: whether the work is left for threads that do not yield. It must call :meth:`check` now and then, and
                is called again after them.
        """
        if self._owner == threading.get_ident():
            return work()
        while True:
            with self._turn(yields), contextlib.suppress(Preempted):
                return work()

    @property
    def gives_way(self) -> bool:
        """Whether this thread is within :meth:`giving_way`."""
        return getattr(self._own, "gives_way", False)

    @contextlib.contextmanager
    def giving_way(self) -> Iterator[None]:
        """Within it nobody waits for what this thread searches: decisions of other threads go first."""
        before, self._own.gives_way = self.gives_way, True
        try:
            yield
        finally:
            self._own.gives_way = before

    def pause(self) -> None:
        """Wait while a thread that does not yield has the turn, or waits for it. For long work outside of turns."""
        if self._owner == threading.get_ident() or not self._is_urgent():
            return
        with self._free:
            self._free.wait_for(lambda: not self._is_urgent())

    def _is_urgent(self) -> bool:
        return bool(self._waiting) or (self._owner is not None and not self._yields)

    def check(self) -> None:
        """Raise Preempted if this thread has the turn and should leave it."""
        if self._waiting and self._yields and self._owner == threading.get_ident():
            raise Preempted

    @contextlib.contextmanager
    def _turn(self, yields: bool) -> Iterator[None]:
        with self._free:
            self._waiting += not yields
            self._free.wait_for(lambda: self._owner is None and not (yields and self._waiting))
            self._waiting -= not yields
            self._owner, self._yields = threading.get_ident(), yields
        try:
            yield
        finally:
            with self._free:
                self._owner = None
                self._free.notify_all()


TURNS = Turns()
"""The turns of this process, which shares its searches."""
