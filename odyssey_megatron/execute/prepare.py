"""Getting ready for an offered generation while the current one trains: its groups are built in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from odyssey_megatron.errors import OdysseyError, Superseded


class Closable(Protocol):
    def close(self) -> None: ...


G = TypeVar("G", bound=Closable)


class Offers(Generic[G]):
    """The offered generation that this rank prepares. Ballots, summed over all ranks, tell whether all have."""

    def __init__(self, decline: Callable[[int, str], None]):
        self._decline, self._lock, self._entered = decline, threading.Lock(), 0
        self._preparation: Preparation[G] | None = None

    def prepare(self, number: int, build: Callable[[], G]) -> None:
        """Begins with offered generation ``number``, in place of an earlier one, unless this rank enters it already."""
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
        """This rank enters generation ``number``: its groups, once they are built, if that is the one that is prepared.
        An earlier one comes to nothing; a later one, of which this rank may hear first, stays.

        Raises:
            OdysseyError: they could not be built.
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
        """The number of what is ready, or 0; and its square."""
        preparation = self._preparation
        number = preparation.number if preparation is not None and preparation.ready else 0
        return number, number**2


def elected(ballots: float, squares: float, size: int) -> int:
    """From the sums of the ballots of ``size`` ranks: the generation that all have prepared; 0: none.

    It is the same one everywhere if the numbers have no variance.
    """
    total = round(ballots)
    return total // size if total**2 == size * round(squares) else 0


class Preparation(Generic[G]):
    """The groups of offered generation ``number``, as soon as they are built.

    ``declined(why)`` is called from the thread if they cannot be; nothing is if a newer generation ended it.
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
        """The groups, which are the caller's from now on, once they are built. Raises what has kept them from it."""
        self._done.wait()
        with self._lock:
            groups, self._groups = self._groups, None
        if groups is None:
            raise self._error or OdysseyError(
                f"generation {self.number} was prepared for somebody else: a bug"
            )
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
