"""How a rank hears of generations: a thread waits for them on its own connection, whatever the main thread does."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from odyssey_megatron.codec import to_json
from odyssey_megatron.errors import ControlPlaneLost, Fenced
from odyssey_megatron.launch.rank.alike import KnownSince
from odyssey_megatron.launch.rank.attention import Attention
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.plan.sending.generation import Finished

_LOOKS_EACH_S = 60.0
"""After this time of waiting for a generation it is looked whether that was deleted: hardly ever, and nothing waits."""


class Watch:
    """The generations of which this rank has heard. All public methods but :meth:`end` are for the main thread.

    Args:
        control: a connection that nothing else uses.
        offered: called in the thread with the text of each generation that is offered, if this rank is ``settled``.
        attention: the record of what the main thread is doing.
        fallen_everywhere: called with number and text of a generation: see ``falling.py``.
        alone_s: how long others may still count on this rank after it has lost the control plane.
    """

    def __init__(
        self,
        control: Control,
        offered: Callable[[str], None],
        attention: Attention,
        *,
        fallen_everywhere: Callable[[int, str], bool],
        alone_s: float,
        settled: bool,
    ):
        self.history = KnownSince()
        self.heard_s = 0.0
        """Time, on this rank's clock, when it heard of the newest generation."""
        self.settled = settled
        """Whether this rank may hold layers. If not, it only waits to be offered a place."""
        self.lost: ControlPlaneLost | Fenced | None = None
        """Why this rank cannot go on, whatever it is doing; None while it can."""
        self._control, self._offered, self._attention = control, offered, attention
        self._fallen_everywhere, self._alone_s = fallen_everywhere, alone_s
        self._changed = threading.Condition()
        self._newest, self._newest_text = 0, ""
        self._offers: dict[int, str] = {}
        """The texts of offers that this rank may still enter. There are several if it is to leave with one and is the
        last to come to it: the others are in it by then, and may have been offered another.
        """
        self._on_newer: dict[int, _Ending] = {}
        self._has_words = False

    def start(self, seen: int = 0) -> None:
        """Start the thread, which follows the generations after number ``seen``."""
        self.history.note(seen)
        threading.Thread(target=self._run, args=(seen,), name="odyssey-watch", daemon=True).start()

    def newest(self) -> tuple[int, str]:
        """Return number and text of the newest generation; 0 and no text if there is none."""
        with self._changed:
            self._attention.heed()
            return self._newest, self._newest_text

    def newer_than(self, number: int) -> bool:
        """Whether a generation after ``number`` exists, or this rank cannot go on. Only reads variables."""
        return self._newest > number or self.lost is not None

    def on_newer(
        self, number: int, end: Callable[[bool], None], fall: Callable[[], None] | None = None
    ) -> None:
        """See ``Member.on_newer``."""
        with self._changed:
            self._on_newer[number] = _Ending(end, fall)
            self._has_words = self._has_words or fall is not None

    def forget(self, number: int) -> None:
        """Drop the callbacks of :meth:`on_newer` for generation ``number``."""
        with self._changed:
            self._on_newer.pop(number, None)

    def take_offer(self, number: int) -> None:
        """Enter offered generation ``number``, unless a newer one has ended it."""
        with self._changed:
            if number in self._offers and self._newest < number:
                self._newest, self._newest_text = number, self._offers[number]
                self._drop_old_offers()
                self.history.note(number)

    def _drop_old_offers(self) -> None:
        self._offers = {number: text for number, text in self._offers.items() if number > self._newest}

    @property
    def _last_offer(self) -> int:
        return max(self._offers, default=0)

    def await_newer(self, after: int, timeout_s: float | None) -> bool:
        """Wait for a generation after ``after``; return whether one came in time. Raises :attr:`lost` if it is set."""
        with self._changed:
            self._attention.heed()
            found = self._changed.wait_for(lambda: self.newer_than(after), timeout_s)
        if self.lost is not None:
            raise self.lost
        return found

    def await_end(self, number: int, timeout_s: float) -> bool:
        """Wait for the end of offered generation ``number``, with which this rank joins; return whether it has ended.

        A newer offer ends it, too. Raises :attr:`lost` if it is set.
        """
        with self._changed:
            self._attention.heed()
            over = self._changed.wait_for(
                lambda: self.newer_than(number) or self._last_offer > number, timeout_s
            )
        if self.lost is not None:
            raise self.lost
        return over

    def await_any(self, after: int) -> tuple[int, str, bool]:
        """Wait for a generation or an offer after ``after``; return its number, its text, and whether it is an offer.

        Raises :attr:`lost` if it is set.
        """
        with self._changed:
            self._attention.heed()
            self._changed.wait_for(
                lambda: max(self._newest, self._last_offer) > after or self.lost is not None
            )
            if self.lost is not None:
                raise self.lost
            if self._last_offer > self._newest:
                return self._last_offer, self._offers[self._last_offer], True
            return self._newest, self._newest_text, False

    def end(self, why: ControlPlaneLost | Fenced) -> None:
        """Note that this rank cannot go on, and end its generations. May be called from any thread."""
        with self._changed:
            self.lost = why
            self._end_before(math.inf, text=None, after_s=self._alone_s if self.settled else 0.0)
            self._changed.notify_all()

    def _run(self, seen: int) -> None:
        try:
            self._follow(seen)
        except Exception as error:  # noqa: BLE001 - a rank that no longer hears of generations must leave
            why = f"the thread that hears of generations failed: {error!r}. Please report this."
            self.end(error if isinstance(error, ControlPlaneLost) else ControlPlaneLost(why))

    def _follow(self, seen: int) -> None:
        number, has_begun = seen + 1, False
        while True:
            try:
                if (oldest := self._oldest()) > number:
                    # This process was stopped meanwhile. All ranks that go on have entered that one, offered or not.
                    number, has_begun = oldest, True
                text = self._control.get(keys.generation_key(number), timeout_s=_LOOKS_EACH_S)
            except (KeyError, TimeoutError):  # deleted in the meantime, perhaps before it was waited for
                continue
            except ValueError:  # not sealed by the coordinator, whose own write will replace it
                time.sleep(0.01)
                continue
            if has_begun:
                text, has_begun = text.removeprefix(keys.OFFER), False
            if text.startswith(keys.OFFER):
                self._hear_offer(number, text.removeprefix(keys.OFFER))
            else:
                self._hear(number, text.removeprefix(keys.AGAIN), again=text.startswith(keys.AGAIN))
            if text == to_json(Finished(number=number)):
                return  # waiting in native code when the store ends would abort an interpreter that is exiting
            number += 1

    def _oldest(self) -> int:
        """Return the oldest generation that is kept; 0 if none was deleted, or another writer has changed the entry."""
        with contextlib.suppress(ValueError):
            return int(self._control.peek(keys.FORGOTTEN) or 0)
        return 0

    def _hear(self, number: int, text: str, *, again: bool) -> None:
        with self._changed:
            # Abort first: afterwards it would hit the groups that the main thread builds for the new generation.
            heard_s = time.monotonic()
            self._end_before(number, text)
            self._newest_text, self._newest, self.heard_s = text, number, heard_s
            self._drop_old_offers()
            if again:
                self._attention.call(heard_s)
            self.history.note(number)
            self._changed.notify_all()

    def _hear_offer(self, number: int, text: str) -> None:
        with self._changed:
            settled = self.settled
            if not settled:
                self._end_before(
                    number, text=None
                )  # the offer that it is getting ready for has come to nothing
                self._offers.clear()
            self._offers[number] = text
            self._changed.notify_all()
        # The main thread of a rank that holds nothing yet waits for offers itself, and builds the groups.
        if settled:
            self._offered(text)

    def _end_before(self, number: float, text: str | None, after_s: float = 0.0) -> None:
        """End all generations before ``number``.

        ``text`` is the new generation's, for which others end theirs, too. None: others may go on for ``after_s`` more.
        """
        over = [self._on_newer.pop(one) for one in [one for one in self._on_newer if one < number]]
        for one in over:
            if one.fall is not None:
                one.fall()
        together = not self._has_words
        try:
            if self._has_words and text is not None:
                together = self._fallen_everywhere(int(number), text)
            elif self._has_words:
                time.sleep(after_s)
        finally:
            for one in over:
                one.end(together)


class _Ending(NamedTuple):
    """The callbacks for the end of a generation; see ``Member.on_newer``."""

    end: Callable[[bool], None]
    fall: Callable[[], None] | None
