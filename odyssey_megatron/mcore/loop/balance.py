"""``--odyssey-sequence-balance``: which microbatch of a step is in which place of the plan, where samples are packed.

Whoever computes heads looks up, before the end of a step, how long the sequences of the next one are. That rides on the
step's agreement, so that all ranks know it, also those that finish the step by themselves or join behind it, and each
works out the same dealing (``plan/dealing.py``), which holds for all of that step, whoever dies in it. Data, randomness
and losses go by a microbatch's number in the step, which does not change: only the place does. A job's first step, and
the first behind a checkpoint, is in natural order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.metrics.outlet import say
from odyssey_megatron.names import step_name
from odyssey_megatron.plan.dealing import deal, dearest
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.policy.profile import Profile

_FINE = 1024
"""Costs are whole numbers of this part of a token's."""


class DealingBroken(OdysseyError):
    """Ranks have computed a step by different dealings: a bug. The job must stop rather than train on."""


class Dealt(NamedTuple):
    """The dealing of a step."""

    step: int = -1
    order: tuple[int, ...] = ()
    """Of each place the microbatch in it; none: its own number."""
    natural: float = 1.0
    """How many times its share the dearest route would cost in natural order."""
    dearest: float = 1.0
    """And costs."""

    @property
    def mark(self) -> int:
        """Of its order; small enough for sums of its square to be exact."""
        return zlib.crc32(repr(self.order).encode()) >> 13


def heads(layout: Layout, worker: int, size: int) -> dict[int, int]:
    """Of a plan's first ``size`` microbatches, those whose heads ``worker`` computes: the first one of their route."""
    return {
        one: route.microbatches[0]
        for route in layout.routes
        if route.hops[-1].worker == worker
        for one in route.microbatches
        if one < size
    }


class Balance:
    """Of one rank; what it knows is the same on all of them.

    Its totals of a step: [ranks, their dealings' marks, the squares of these, (cost, route) of each place of the next
    step's]; a route is called by the first of its places, counted from 1; 0 is one that is not known.
    """

    def __init__(self, places: int = 0, *, steps: int = 0, cost_of: Callable[[float], int] = int):
        """
        Args:
            places: microbatches of the largest step, as a plan counts; 0: nothing is ever dealt.
            steps: of the job.
            cost_of: a microbatch's cost, from the sum of its squared lengths.
        """
        self._places, self._steps, self._cost_of = places, steps, cost_of
        self._ahead: dict[int, float] = {}
        self._ahead_of = -1
        self._next = self.dealt = Dealt()

    @classmethod
    def of(
        cls,
        settings: OdysseyConfig,
        *,
        is_packed: bool,
        speaks: bool,
        places: int,
        steps: int,
        seq_length: int,
        rows: int,
        profile: Callable[[int], Profile],
    ) -> Balance:
        """What ``settings`` ask for.

        Args:
            is_packed: samples are packed sequences.
            speaks: this rank tells the user that there is nothing to do.
            rows: of a microbatch, each of ``seq_length`` tokens.
            profile: what such a model is expected to cost with sequences of a length.
        """
        if settings.sequence_balance == "off":
            return cls()
        if not is_packed:
            if speaks:
                say(
                    f"[odyssey] --odyssey-sequence-balance {settings.sequence_balance} does nothing: all sequences are "
                    "of one length. It is for packed ones (--sft, --dataloader-inter-document-masking)."
                )
            return cls()
        tokens, of_square = seq_length * rows, tokens_of_square(profile, seq_length)
        return cls(places, steps=steps, cost_of=lambda squares: round(_FINE * (tokens + of_square * squares)))

    @property
    def num_totals(self) -> int:
        return 3 + 2 * self._places if self._places else 0

    def begin(self, step: int) -> None:
        """Microbatches are those of ``step`` from now on, which may have begun before; -1: of an evaluation."""
        self.dealt = self._next if self._next.step == step else Dealt(step)

    def in_place(self, place: int) -> int:
        """The microbatch there."""
        return self.dealt.order[place] if self.dealt.order else place

    @property
    def seen(self) -> tuple[float, float] | None:
        """How many times its share the dearest route costs in natural order, and as dealt; None: nothing is known."""
        return (self.dealt.natural, self.dealt.dearest) if self.dealt.order else None

    def look_ahead(self, step: int, places: Iterable[int], squares: Callable[[int], float]) -> None:
        """Looks up what is not known yet of ``places`` of ``step``; ``squares``: of the microbatch of such a number."""
        if step != self._ahead_of:
            self._ahead, self._ahead_of = {}, step
        if self._places and step < self._steps:
            self._ahead |= {one: squares(one) for one in places if one not in self._ahead}

    def local_totals(self, routes: Mapping[int, int], *, speaks: bool) -> torch.Tensor:
        """This rank's share, on the host, behind :meth:`look_ahead` at the places of ``routes``.

        Args:
            routes: of each place whose head this rank computes, the first one of its route; of the next step's.
            speaks: of its cell it says which routes these are.
        """
        totals, mark = [0] * self.num_totals, self.dealt.mark
        if totals:
            totals[:3] = 1, mark, mark**2
        for place in routes.keys() & self._ahead.keys():
            pair = self._cost_of(self._ahead[place]), (1 + routes[place]) * speaks
            totals[3 + 2 * place : 5 + 2 * place] = pair
        return torch.tensor(totals, dtype=torch.float64)

    def take(self, totals: torch.Tensor, step: int) -> None:
        """``totals`` of the step before, over all ranks. Raises DealingBroken."""
        if not self._places or not totals[0]:
            return
        ranks, marks, squares = (int(one) for one in totals[:3].tolist())
        if ranks * squares != marks**2:
            raise DealingBroken(
                f"{step_name(step - 1)}: the ranks have not dealt its microbatches alike. No weight was changed. This "
                "must not happen; please report it with the journal."
            )
        table = [(int(cost), int(route)) for cost, route in totals[3:].reshape(-1, 2).tolist()]
        known = [one for one in table if one[1]]
        # All places of a step are known, or none: the first ones, as many as it has.
        costs, routes = [cost for cost, _ in known], [route for _, route in known]
        order = deal(costs, routes) if known else ()
        natural = range(len(known))
        self._next = Dealt(
            step, order, dearest(costs, routes, natural), dearest(costs, routes, order or natural)
        )


def tokens_of_square(profile: Callable[[int], Profile], seq_length: int) -> float:
    """How many tokens cost as much as one of the sum of squared lengths, in a model's transformer layers.

    By the estimate for two lengths: what a sequence costs is ``a * length + b * length**2``.
    """

    def seconds(length: int) -> float:
        return sum(layer.compute_s for layer in profile(length).costs.layers[1:-1])

    once, twice = seconds(seq_length), seconds(2 * seq_length)
    of_squares = (twice - 2 * once) / 2
    return of_squares / ((once - of_squares) * seq_length)
