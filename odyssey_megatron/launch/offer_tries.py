"""When to offer again what came to nothing."""

from __future__ import annotations

import time

_MAX_FAILED = 3
"""So many in a row, and the next try is much later; the job goes on as it is until then."""
_AGAIN_S = 30.0


class OfferTries:
    """Offers that failed, for whatever reason, of which some go by: a host that was overloaded."""

    def __init__(self) -> None:
        self._failed, self._again_s = 0, 0.0

    def failed(self, *, for_now: bool = False) -> None:
        """One more; ``for_now``: there is no use in trying at once."""
        self._failed = _MAX_FAILED if for_now else self._failed + 1

    def begin_anew(self) -> None:
        """What failed before says nothing of the next one."""
        self._failed = 0

    def waits(self) -> bool:
        """Whether nothing is to be offered now."""
        now_s = time.monotonic()
        if now_s >= self._again_s:
            self._failed = min(self._failed, _MAX_FAILED - 1)
        if self._failed < _MAX_FAILED:
            self._again_s = now_s + _AGAIN_S
        return self._failed >= _MAX_FAILED
