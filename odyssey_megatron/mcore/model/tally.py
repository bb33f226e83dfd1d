"""What the forwards of a step have come to on this rank, each microbatch once (I4)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from odyssey_megatron.mcore.loop import outcome
from odyssey_megatron.mcore.model.experts import Records, Routing
from odyssey_megatron.mcore.model.future import FutureTokens

Reported = dict[str, torch.Tensor]
"""Of a microbatch whose head has run; else empty."""

Tokens = torch.Tensor | float
"""How many of a microbatch; nobody waits for a device to know."""


class Tally:
    """Tokens and losses of the microbatches whose head ran here, and what routers of experts have counted."""

    def __init__(self, loss_names: Sequence[str], future: FutureTokens, routing: Routing):
        """``loss_names``: of what forward steps report."""
        self._loss_names, self._future, self._routing = loss_names, future, routing
        self.names = (*loss_names, *future.names)
        """Of the losses of a step; an evaluation has those that are reported."""
        self.tokens: dict[int, Tokens] = {}
        self.losses: dict[int, Reported] = {}
        self._ahead: dict[tuple[int, int], tuple[Tokens, Reported, Records]] = {}
        """Of forwards run ahead, which count for nothing yet."""

    def clear(self) -> None:
        self._ahead.clear()
        self.losses.clear()
        self._routing.records.clear()
        self.tokens.clear()

    def read(self, results: Sequence[Reported]) -> Reported:
        """What a forward comes to whose forward steps have given ``results``, of which the last counts. Raises
        ConfigError if that is something unexpected.
        """
        if not results:
            return {}
        return outcome.checked(results[-1], self._loss_names) | self._future.taken()

    def count(self, microbatch: int, tokens: Tokens, reported: Reported) -> None:
        """A forward."""
        if reported:
            self.tokens[microbatch] = tokens
            self.losses[microbatch] = reported

    def add(
        self, microbatch: int, first: int, last: int, tokens: Tokens, reported: Reported, *, ahead: bool
    ) -> None:
        """As :meth:`count`; nothing yet of a forward that is run ``ahead``."""
        if not ahead:
            return self.count(microbatch, tokens, reported)
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
