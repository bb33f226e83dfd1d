"""Who works with a search: it is one thread's at a time, and a decision's before that of what may be asked next.

What a search knows is shared by decisions and by the thread that works out what the next ones will look up. That takes
seconds; a recovery does not wait for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Preempted(Exception):
    """Somebody waits who goes first: what was begun is begun anew behind him."""


class Turns:
    """Of threads, one of which decides."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner: int | None = None
        self._yields = False
        self._waiting = 0
        """Of those that do not yield."""

    def run(self, work: Callable[[], T], *, yields: bool) -> T:
        """What ``work`` gives, alone; within another work of this thread, at once.

        Args:
            yields: ``work`` is called again where somebody came who does not: it calls :meth:`check` now and then, and
                is left there.
        """
        if self._owner == threading.get_ident():
            return work()
        while True:
            with self._turn(yields), contextlib.suppress(Preempted):
                return work()

    def check(self) -> None:
        """Raises Preempted."""
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
"""Of this process: so are its searches."""
