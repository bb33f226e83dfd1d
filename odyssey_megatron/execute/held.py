"""Messages that leave later than they could: of links that are to be slow, as was asked for. On a CPU only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from odyssey_megatron.policy.measured import LinkTimes

_UNKNOWN = LinkTimes(message_bytes=1, empty_s=1e-3, message_s=1e-3)
"""A rank that has come back has not timed its link."""


class Held:
    """A message on its way out."""

    def __init__(self, posted: Future[Any]):
        self._posted = posted

    def wait(self) -> None:
        """Raises what the group raises."""
        self.sent.wait()

    @property
    def sent(self) -> Any:
        """Its work, once it has left."""
        return self._posted.result()


class SlowLinks:
    """Of one rank. To each receiver one message leaves after the other, from a thread: nobody waits for that who sends.

    Args:
        factors: step -> receiver -> how many times their time its messages take.
    """

    def __init__(self, factors: Callable[[int], Mapping[int, float]] = lambda step: {}) -> None:
        self.times = _UNKNOWN
        """What a message takes."""
        self._of_step, self._factors = factors, dict[int, float]()
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def begin(self, step: int) -> None:
        """From now on as in ``step``."""
        self._factors = dict(self._of_step(step))

    def post(self, receiver: int, num_bytes: int, send: Callable[[], Any]) -> Any:
        """``send``, now or later."""
        factor = self._factors.get(receiver, 1.0)
        if factor == 1.0 and receiver not in self._threads:
            return send()
        times = self.times
        each_s = (times.message_s - times.empty_s) / max(1, times.message_bytes)
        longer_s = (factor - 1.0) * (times.empty_s + max(0.0, each_s) * num_bytes)

        def held() -> Any:
            time.sleep(longer_s)
            return send()

        thread = self._threads.setdefault(receiver, ThreadPoolExecutor(1, "odyssey-slow-link"))
        return Held(thread.submit(held))

    def abandon(self) -> None:
        """Lets go of what has not left."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads.clear()
