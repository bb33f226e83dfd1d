"""What a look for a better plan says, kept back until it is known to count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol


class Events(Protocol):
    """What takes events: ``Journal``, and :class:`Said`."""

    def event(
        self, name: str, *, generation: int = -1, step: int = -1, echo: bool = False, **values: Any
    ) -> None:
        """See ``Journal.event``."""
        ...


class Said:
    """Events for the journal and lines for the user, in order."""

    def __init__(self, journal: Events, say: Callable[[str], None]):
        self._journal, self._say = journal, say
        self._kept: list[Callable[[], None]] = []

    def event(
        self, name: str, *, generation: int = -1, step: int = -1, echo: bool = False, **values: Any
    ) -> None:
        event = partial(self._journal.event, name, generation=generation, step=step, echo=echo, **values)
        self._kept.append(event)

    def say(self, text: str) -> None:
        self._kept.append(partial(self._say, text))

    def tell(self) -> None:
        """Say what was kept back."""
        kept = self.forget()
        for one in kept:
            one()

    def forget(self) -> list[Callable[[], None]]:
        """Drop and return what was kept back."""
        kept, self._kept = self._kept, []
        return kept
