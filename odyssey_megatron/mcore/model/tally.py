"""What the forwards of a step have come to on this rank, each microbatch once (I4)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from odyssey_megatron.mcore.loop import outcome
from odyssey_megatron.mcore.model.experts import Records, Routing

Reported = Sequence[dict[str, torch.Tensor]]
"""What forward steps have reported of a microbatch; the last one counts."""

Tokens = torch.Tensor | float
"""How many of a microbatch; nobody waits for a device to know."""


class Tally:
    """Tokens and losses of the microbatches whose head ran here, and what routers of experts have counted."""

    def __init__(self, loss_names: Sequence[str], routing: Routing):
        self._loss_names, self._routing = tuple(loss_names), routing
        self.tokens: dict[int, Tokens] = {}
        self.losses: dict[int, dict[str, torch.Tensor]] = {}
        self._ahead: dict[tuple[int, int], tuple[Tokens, Reported, Records]] = {}
        """Of forwards run ahead, which count for nothing yet."""

    def clear(self) -> None:
        self._ahead.clear()
        self.losses.clear()
        self._routing.records.clear()
        self.tokens.clear()

    def count(self, microbatch: int, tokens: Tokens, reported: Reported) -> None:
        """A forward. Raises ConfigError if it has reported something unexpected."""
        if reported:
            self.tokens[microbatch] = tokens
            self.losses[microbatch] = outcome.checked(reported[-1], self._loss_names)

    def put_aside(self, microbatch: int, first: int, last: int, tokens: Tokens, reported: Reported) -> None:
        """As :meth:`count`, of a forward that is run ahead."""
        self._ahead[microbatch, first] = tokens, reported, self._routing.take_back(microbatch, first, last)

    def undo(self, microbatch: int, first: int, last: int, *, with_losses: bool) -> None:
        """That forward has counted for nothing."""
        self._ahead.pop((microbatch, first), None)
        self._routing.take_back(microbatch, first, last)
        if with_losses:
            self.tokens.pop(microbatch, None)
            self.losses.pop(microbatch, None)

    def adopt(self, ours: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of the visits (microbatch, first layer) run ahead ``ours`` count from now on; gives the others, which go."""
        ahead, self._ahead = self._ahead, {}
        for place, (tokens, reported, routed) in ahead.items():
            if place in ours:
                self.count(place[0], tokens, reported)
                self._routing.records |= routed
        return [place for place in ahead if place not in ours]
