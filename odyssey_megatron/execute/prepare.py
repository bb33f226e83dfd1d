"""Preparing an offered generation while the current one trains: its groups are built in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from odyssey_megatron.errors import OdysseyError, Superseded


class Closable(Protocol):
    def close(self) -> None: ...


G = TypeVar("G", bound=Closable)


class Offers(Generic[G]):
    """The offered generation that this rank prepares. The sums of all ranks' ballots say if all have prepared it."""

    def __init__(self, decline: Callable[[int, str], None]):
        self._decline, self._lock, self._entered = decline, threading.Lock(), 0
        self._preparation: Preparation[G] | None = None

    def prepare(self, number: int, build: Callable[[], G]) -> None:
        """Begin to prepare offered generation ``number``, in place of an earlier one.

        Nothing is done if this rank enters it, or a later one, already.
        """
        with self._lock:
            if number <= self._entered:
                return
            before, self._preparation = (
                self._preparation,
                Preparation(number, build, declined=lambda why: self._decline(number, why)),
            )
        if before is not None:
            before.drop()

    def take(self, number: int) -> G | None:
        """Return the groups of generation ``number``, which this rank enters; None if they are not prepared.

        Waits until they are built. An earlier preparation is dropped. A later one, of which this rank may
        hear first, stays.

        Raises:
            OdysseyError: The groups could not be built.
        """
        with self._lock:
            self._entered, preparation = number, self._preparation
            if preparation is None or preparation.number > number:
                return None
            self._preparation = None
        if preparation.number == number:
            return preparation.take()
        preparation.drop()
        return None

    def ballot(self) -> tuple[int, int]:
        """Return the number of the generation that is ready, or 0, and its square."""
        preparation = self._preparation
        number = preparation.number if preparation is not None and preparation.ready else 0
        return number, number**2


def elected(ballots: float, squares: float, size: int) -> int:
    """Return the generation that all ``size`` ranks have prepared, from the sums of their ballots; 0: none.

    All have prepared the same one if their numbers have no variance.
    """
    total = round(ballots)
    return total // size if total**2 == size * round(squares) else 0


class Preparation(Generic[G]):
    """The groups of offered generation ``number``, which a thread builds.

    Args:
        declined: Called from the thread with the reason if the groups cannot be built, unless a newer
            generation has ended the preparation.
    """

    def __init__(self, number: int, build: Callable[[], G], declined: Callable[[str], None]):
        self.number = number
        self._build, self._declined = build, declined
        self._lock, self._done = threading.Lock(), threading.Event()
        self._groups: G | None = None
        self._error: Exception | None = None
        self._dropped = False
        threading.Thread(target=self._run, name="odyssey-prepare", daemon=True).start()

    @property
    def ready(self) -> bool:
        return self._groups is not None

    def take(self) -> G:
        """Return the groups once they are built; they are the caller's then. Raises what has kept them from it."""
        self._done.wait()
        with self._lock:
            groups, self._groups = self._groups, None
        if groups is None:
            raise self._error or OdysseyError(
                f"generation {self.number} was prepared for somebody else: a bug"
            )
        return groups

    def drop(self) -> None:
        """Close the groups, now or once they are built, as they are not needed."""
        with self._lock:
            self._dropped, groups, self._groups = True, self._groups, None
        if groups is not None:
            groups.close()

    def _run(self) -> None:
        try:
            groups = self._build()
            with self._lock:
                if not self._dropped:
                    self._groups = groups
                    return
            groups.close()
        except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is
            self._error = error
            if not isinstance(error, Superseded):
                self._declined(str(error))
        finally:
            self._done.set()
