"""What a rank tells the coordinator on its way, and leaves for other ranks. It waits for no answer."""

from __future__ import annotations

from odyssey_megatron.cluster.events import OfferFailed, Retry
from odyssey_megatron.launch.rank.attention import Attention
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control


class Reports:
    """One rank's reports. All methods raise ControlPlaneLost when the store is gone."""

    def __init__(self, *, rank: int, control: Control, attention: Attention):
        self._rank, self._control, self._attention = rank, control, attention
        self.ran_out = False
        """Whether this rank has run out of memory and entered no generation since."""

    def decline(self, number: int, reason: str) -> None:
        """Report that this rank cannot prepare offered generation ``number``."""
        self._control.send(OfferFailed(rank=self._rank, generation=number, reason=reason))

    def ask_retry(self, number: int, reason: str, *, out_of_memory: bool = False) -> None:
        """Ask for fresh groups, although perhaps nobody has died. Ignored once ``number`` is outdated.

        ``out_of_memory``: ask for a plan that needs less memory, too.
        """
        retry = Retry(
            rank=self._rank,
            generation=number,
            reason=reason,
            patience_s=self._attention.longest_s,
            out_of_memory=out_of_memory,
        )
        self._control.send(retry)
        self.ran_out |= out_of_memory

    def publish_observations(self, observations_json: str) -> None:
        """Replace the measured costs of this rank that the coordinator uses for its next decision."""
        self._control.put(keys.observations_key(self._rank), observations_json)

    def note(self, name: str, value: str) -> None:
        """Leave ``value`` for the rank that takes over a task of this rank's."""
        self._control.put(f"note/{name}", value)

    def noted(self, name: str) -> str | None:
        """Return the newest value that a rank left under ``name``, if there is one."""
        return self._control.peek(f"note/{name}")
