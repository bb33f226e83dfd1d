"""The results of a step's forwards on this rank, with each microbatch counted once (I4)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from odyssey_megatron.mcore.loop import outcome
from odyssey_megatron.mcore.model.experts import Records, Routing
from odyssey_megatron.mcore.model.future import FutureTokens

Reported = dict[str, torch.Tensor]
"""The losses that a microbatch whose head has run reported, by name; else empty."""

Tokens = torch.Tensor | float
"""The number of tokens of a microbatch; it may lie on the device, and nobody waits for it."""


class Tally:
    """Tokens and losses of the microbatches whose head ran here, and what routers of experts have counted."""

    def __init__(self, loss_names: Sequence[str], future: FutureTokens, routing: Routing):
        """``loss_names``: names of the losses that forward steps report, the only ones of an evaluation."""
        self.loss_names, self._future, self._routing = loss_names, future, routing
        self.names = (*loss_names, *future.names)
        """Names of the losses of a step."""
        self.tokens: dict[int, Tokens] = {}
        self.losses: dict[int, Reported] = {}
        self._ahead: dict[tuple[int, int], tuple[Tokens, Reported, Records]] = {}
        """Results of forwards that were run ahead, which count for nothing yet."""

    def clear(self) -> None:
        self._ahead.clear()
        self.losses.clear()
        self._routing.records.clear()
        self.tokens.clear()

    def begin_forward(self) -> None:
        """Drop what a forward has left that was interrupted."""
        self._future.taken()

    def read(self, results: Sequence[Reported]) -> Reported:
        """The losses of a forward whose forward steps have given ``results``, of which the last one counts. Raises
        ConfigError if it is something unexpected.
        """
        if not results:
            return {}
        return outcome.checked(results[-1], self.loss_names) | self._future.taken()

    def count(self, microbatch: int, tokens: Tokens, reported: Reported) -> None:
        """Count a forward."""
        if reported:
            self.tokens[microbatch] = tokens
            self.losses[microbatch] = reported

    def add(
        self, microbatch: int, first: int, last: int, tokens: Tokens, reported: Reported, *, ahead: bool
    ) -> None:
        """Count a forward, or put its results aside if it was run ``ahead``."""
        if not ahead:
            return self.count(microbatch, tokens, reported)
        self._ahead[microbatch, first] = tokens, reported, self._routing.take_back(microbatch, first, last)

    def undo(self, microbatch: int, first: int, last: int, *, with_losses: bool) -> None:
        """Remove what has been counted of that forward."""
        self._ahead.pop((microbatch, first), None)
        self._routing.take_back(microbatch, first, last)
        if with_losses:
            self.tokens.pop(microbatch, None)
            self.losses.pop(microbatch, None)

    def adopt(self, ours: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """Count the forwards run ahead for the visits ``ours``, (microbatch, first layer); drop and return the other
        visits.
        """
        ahead, self._ahead = self._ahead, {}
        for place, (tokens, reported, routed) in ahead.items():
            if place in ours:
                self.count(place[0], tokens, reported)
                self._routing.records |= routed
        return [place for place in ahead if place not in ours]
