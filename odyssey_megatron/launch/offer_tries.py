"""When to offer again what came to nothing."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_FAILED = 3
"""So many in a row, and the next try is much later; the job goes on as it is until then."""
_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class OfferTries:
    """Offers that failed, for whatever reason, of which some go by: a host that was overloaded."""

    failed: int = 0
    """In a row."""
    again_s: float = 0.0
    """Nothing is offered before."""

    def after_failure(self, now_s: float, *, for_now: bool = False) -> OfferTries:
        """One more; ``for_now``: there is no use in trying at once."""
        failed = _MAX_FAILED if for_now else min(self.failed + 1, _MAX_FAILED)
        return OfferTries(failed, now_s + _AGAIN_S if failed == _MAX_FAILED else 0.0)

    def waits(self, now_s: float) -> bool:
        """Whether nothing is to be offered now."""
        return now_s < self.again_s
