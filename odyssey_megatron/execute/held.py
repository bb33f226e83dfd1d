"""Messages that are held back, on links that an injected fault makes slow. On a CPU only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from odyssey_megatron.policy.costs.measured import LinkTimes

_UNKNOWN = LinkTimes(worker=-1, message_bytes=1, empty_s=1e-3, message_s=1e-3)
"""What is assumed on a rank that has timed no link: one that has come back, or had nobody to time it with."""


class Held:
    """A message that is held back."""

    def __init__(self, posted: Future[Any]):
        self._posted = posted

    def wait(self) -> None:
        """Wait until it is sent. Raises what the group raises."""
        self.sent.wait()

    @property
    def sent(self) -> Any:
        """The work of the message, once it has left."""
        return self._posted.result()


class SlowLinks:
    """The slow links of one rank. A thread for each receiver sends the messages one after the other.

    So the sender never waits.

    Args:
        factors: Gives for a step: receiver -> the factor by which messages to it take longer.
    """

    def __init__(self, factors: Callable[[int], Mapping[int, float]] = lambda step: {}) -> None:
        self.times = _UNKNOWN
        """What a message takes on a link that is not slow."""
        self._of_step, self._factors = factors, dict[int, float]()
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def begin(self, step: int) -> None:
        """Use the factors of ``step`` from now on."""
        self._factors = dict(self._of_step(step))

    def post(self, receiver: int, num_bytes: int, send: Callable[[], Any]) -> Any:
        """Call ``send``, now or later."""
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
        """Let go of what has not left."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads.clear()
