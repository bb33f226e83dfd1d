"""When to make an offer again after one has failed."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_FAILED = 3
"""After this number of failed offers in a row the next try is much later; until then the job goes on as it is."""
_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class OfferTries:
    """Counts failed offers. Some reasons for them pass, such as an overloaded host, so that it is worth trying
    again.
    """

    failed: int = 0
    """Number of failed offers in a row."""
    again_s: float = 0.0
    """The time before which nothing is offered."""

    def after_failure(self, now_s: float, *, for_now: bool = False) -> OfferTries:
        """Return the count after one more failure; with ``for_now`` there is no use in trying again at once."""
        failed = _MAX_FAILED if for_now else min(self.failed + 1, _MAX_FAILED)
        return OfferTries(failed, now_s + _AGAIN_S if failed == _MAX_FAILED else 0.0)

    def waits(self, now_s: float) -> bool:
        """Whether nothing is to be offered now."""
        return now_s < self.again_s
