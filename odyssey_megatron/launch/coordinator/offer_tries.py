"""When to make another offer after offers have failed."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_FAILED = 3
"""Number of failures in a row after which the job goes on as it is for ``_AGAIN_S`` before the next offer."""
_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class OfferTries:
    """Count of the offers that failed. Another try makes sense, as some causes pass, like an overloaded host."""

    failed: int = 0
    """Number of offers that failed in a row, at most ``_MAX_FAILED``."""
    again_s: float = 0.0
    """Time before which nothing is offered."""

    def after_failure(self, now_s: float, *, for_now: bool = False) -> OfferTries:
        """Return the count after one more failure. ``for_now``: it is no use to try again at once."""
        failed = _MAX_FAILED if for_now else min(self.failed + 1, _MAX_FAILED)
        return OfferTries(failed, now_s + _AGAIN_S if failed == _MAX_FAILED else 0.0)

    def waits(self, now_s: float) -> bool:
        """Whether it is too early to offer anything."""
        return now_s < self.again_s
