"""Getting ready for an offered generation while the current one trains: its groups are built in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from odyssey_megatron.errors import OdysseyError, PeerFailed, Superseded


class Closable(Protocol):
    def close(self) -> None: ...


G = TypeVar("G", bound=Closable)


class Preparation(Generic[G]):
    """The groups of offered generation ``number``, as soon as they are built.

    ``declined(why)`` is called from the thread if they cannot be; nothing is if a newer generation ended it.
    """

    def __init__(self, number: int, build: Callable[[], G], declined: Callable[[str], None]):
        self.number = number
        self._build, self._declined = build, declined
        self._lock = threading.Lock()
        self._groups: G | None = None
        self._dropped = False
        threading.Thread(target=self._run, name="odyssey-prepare", daemon=True).start()

    @property
    def ready(self) -> bool:
        return self._groups is not None

    def take(self) -> G:
        """The groups, which are the caller's from now on; only when :attr:`ready`."""
        with self._lock:
            groups, self._groups = self._groups, None
        if groups is None:
            raise OdysseyError(f"generation {self.number} was entered before it was prepared: a bug")
        return groups

    def drop(self) -> None:
        """They are not needed."""
        with self._lock:
            self._dropped, groups, self._groups = True, self._groups, None
        if groups is not None:
            groups.close()

    def _run(self) -> None:
        try:
            groups = self._build()
        except Superseded:
            return
        except PeerFailed as error:
            self._declined(str(error))
            return
        with self._lock:
            if not self._dropped:
                self._groups = groups
                return
        groups.close()
