"""How often the ranks of a node have been started, and whether one that has ended may be started once more."""

from __future__ import annotations

from dataclasses import dataclass, field

from odyssey_megatron.errors import ENDS_OF_JOB, EXIT_FENCED, EXIT_LEFT_OUT
from odyssey_megatron.launch.process.signals import HANDLED

_AFTER_S, AT_MOST_S = 0.5, 8.0
"""Seconds before a rank is started again, which double with each short life in a row, up to a limit."""
_SHORT_LIFE_S = 10.0
_COUNTS_S = 86_400.0
"""A start counts for a day: a job of months outlives unrelated failures of one GPU, and a broken GPU fails at once."""
ANEW = 3
"""The number of times a rank is started anew before the job begins; the user is to see what kills it each time."""
_FINAL = ENDS_OF_JOB | {0}
"""Exit codes of ranks that have finished, or that would end in the same way again."""


@dataclass(slots=True, kw_only=True)
class _Rank:
    """The history of a rank's processes."""

    again_s: list[float] = field(default_factory=list)
    """When it died and was to be started again in the running job, as far as that counts."""
    starts: int = 0
    """Number of processes after the first."""
    anew: int = 0
    """Number of those that were started anew: the job has not missed the process before."""
    began_s: float | None = None
    """When its newest process began; None: that is the first, which began before the agent looked."""
    short: int = 0
    """Number of processes in a row that ended soon."""
    is_unmissed: bool = False
    """Whether it has died and is to be started anew, so that its death need not be reported."""


class Lives:
    """The history of the ranks of one node. Times are the caller's, by one clock.

    Args:
        limit: The number of times that each rank may be started again in a running job within a day.
        anew_within_s: A process that was ended within this time may be started anew.
        began_s: About when the first processes began.
    """

    def __init__(self, limit: int, anew_within_s: float, began_s: float):
        self._limit, self._anew_within_s, self._began_s = limit, anew_within_s, began_s
        self._ranks: dict[int, _Rank] = {}
        self._wrong: set[int] = set()
        """Slots in which a rank has been left out for wrong numbers."""

    def _of(self, rank: int) -> _Rank:
        return self._ranks.setdefault(rank, _Rank())

    def may_begin_anew(self, rank: int, code: int, now_s: float) -> bool:
        """Whether ``rank``, which ended with ``code``, was killed early, and not too often.

        Its end need not be reported then, if the job has not missed it by now.
        """
        one = self._of(rank)
        # The time is limited as a script that joins no job would seem to be at its beginning for ever.
        began_s = self._began_s if one.began_s is None else one.began_s
        return (
            code < 0 and -code not in HANDLED and one.anew < ANEW and now_s - began_s <= self._anew_within_s
        )

    def begin_anew(self, rank: int) -> int:
        """Note that ``rank`` is started anew; return the number of times it has been, with this one."""
        one = self._of(rank)
        one.anew, one.is_unmissed = one.anew + 1, True
        return one.anew

    def was_wrong_before(self, slot: int, code: int) -> bool:
        """Whether ``code`` says that a rank in ``slot`` has been left out for wrong numbers for the second time."""
        return code == EXIT_LEFT_OUT and slot in self._wrong

    def is_over(self, rank: int, code: int) -> bool:
        """Whether ``rank``, which ended with ``code``, is done: it is neither started again nor counts as lost."""
        return not self._of(rank).is_unmissed and code in _FINAL

    def next_in_s(self, rank: int, slot: int, code: int, now_s: float) -> float | None:
        """Return the seconds until ``rank``, which ended now in ``slot`` and is not over, is started again.

        None: it is lost for good, since it has died too often, or its numbers were wrong twice.
        """
        one = self._of(rank)
        if one.is_unmissed:
            one.is_unmissed = False
            return _AFTER_S
        one.again_s = [at_s for at_s in one.again_s if now_s - at_s < _COUNTS_S]
        was_wrong = self.was_wrong_before(slot, code)
        if code == EXIT_LEFT_OUT:
            self._wrong.add(slot)
        if code != EXIT_FENCED:  # being fenced says nothing against the rank itself
            if was_wrong or len(one.again_s) >= self._limit:
                return None
            one.again_s.append(now_s)
        # A process that failed at once may well do so again.
        soon = one.began_s is not None and now_s - one.began_s < _SHORT_LIFE_S
        one.short = one.short + 1 if soon else 0
        return float(min(AT_MOST_S, _AFTER_S * 2**one.short))

    def moves(self, rank: int) -> None:
        """Note that ``rank`` gets another GPU: the deaths of its processes before do not count any more."""
        one = self._of(rank)
        one.again_s, one.short = [], 0

    def readmit(self, rank: int, slot: int) -> None:
        """Note that ``rank`` starts in ``slot``, whose GPU works again: nothing counts that was before."""
        self.moves(rank)
        self._wrong.discard(slot)

    def start(self, rank: int, now_s: float) -> tuple[int, int]:
        """Note that a process of ``rank`` begins; return its number, and how many of the starts were not anew."""
        one = self._of(rank)
        one.starts, one.began_s = one.starts + 1, now_s
        return one.starts, one.starts - one.anew

    def never_began(self, rank: int) -> None:
        """Take back the newest :meth:`start`: the process could not be made."""
        self._of(rank).starts -= 1
