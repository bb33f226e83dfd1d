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
