"""What the forwards of a step have come to on this rank, each microbatch once (I4)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from odyssey_megatron.mcore.loop import outcome
from odyssey_megatron.mcore.model.experts import Records, Routing

Reported = Sequence[dict[str, torch.Tensor]]
"""What forward steps have reported of a microbatch; the last one counts."""


class Tally:
    """Tokens and losses of the microbatches whose head ran here, and what routers of experts have counted."""

    def __init__(self, loss_names: Sequence[str], routing: Routing):
        self._loss_names, self._routing = tuple(loss_names), routing
        self.tokens = 0.0
        self.losses: dict[int, dict[str, torch.Tensor]] = {}
        self._ahead: dict[tuple[int, int], tuple[float, Reported, Records]] = {}
        """Of forwards run ahead, which count for nothing yet."""

    def clear(self) -> None:
        self._ahead.clear()
        self.losses.clear()
        self._routing.records.clear()
        self.tokens = 0.0

    def count(self, microbatch: int, tokens: float, reported: Reported) -> None:
        """A forward. Raises ConfigError if it has reported something unexpected."""
        self.tokens += tokens
        if reported:
            self.losses[microbatch] = outcome.checked(reported[-1], self._loss_names)

    def put_aside(self, microbatch: int, first: int, last: int, tokens: float, reported: Reported) -> None:
        """As :meth:`count`, of a forward that is run ahead."""
        self._ahead[microbatch, first] = tokens, reported, self._routing.take_back(microbatch, first, last)

    def adopt(self, ours: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of the visits (microbatch, first layer) run ahead ``ours`` count from now on; gives the others, which go."""
        ahead, self._ahead = self._ahead, {}
        for place, (tokens, reported, routed) in ahead.items():
            if place in ours:
                self.count(place[0], tokens, reported)
                self._routing.records |= routed
        return [place for place in ahead if place not in ours]
