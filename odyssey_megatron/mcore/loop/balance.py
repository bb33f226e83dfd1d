"""``--odyssey-sequence-balance``: which microbatch of a step is in which place of the plan, where samples are packed.

Whoever computes heads looks up, before the end of a step, how long the sequences of the next one are. That rides on the
step's agreement, so that all ranks know it, also those that finish the step by themselves or join behind it, and each
works out the same dealing (``plan/dealing.py``), which holds for all of that step, whoever dies in it. Data, randomness
and losses go by a microbatch's number in the step, which does not change: only the place does. A job's first step, and
the first behind a checkpoint, is in natural order.

What a sequence of some length costs beside another is estimated, until ranks have measured it: what theirs take by
their squared lengths rides on the agreement, too, so that all go by the same sums.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.diagnosis.fit import cost
from odyssey_megatron.errors import OdysseyError
from odyssey_megatron.metrics.outlet import say
from odyssey_megatron.names import step_name
from odyssey_megatron.plan.dealing import deal, dearest
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import Instr, by_microbatch
from odyssey_megatron.policy.profile import Profile

_FINE = 2**30
"""Costs are whole numbers up to this, that of the dearest microbatch that there can be on one rank."""
_KEPT_STEPS = 8
"""Measured steps by which a rank says what its microbatches take."""
_PRECISE = 0.01
"""Of a microbatch's time: nobody says what lengths cost before the usual difference between two is known so well."""
_HEAD = 5
"""Totals before those of places."""


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
    squares: tuple[int, ...] = ()
    """Of each microbatch, by its number in the step, the sum of its squared lengths; none where a place's microbatch is
    several ranks'."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of the sequences in microbatches.

    Args:
        tokens: of one rank's microbatch.
        of_square: how many tokens cost as much as one of the sum of squared lengths, by the estimate.
        longest: the most that this sum can be.
    """

    tokens: float
    of_square: float
    longest: float


class Balance:
    """Of one rank; what it knows is the same on all of them, but for what its own microbatches have taken.

    Its totals of a step: [ranks, their dealings' marks, the squares of these, nanoseconds that a microbatch takes on
    all ranks whatever its lengths, and how many more one of ``Lengths.longest``, then (sum of squared lengths, route,
    microbatches) of each place of the next step's]; a route is called by the first of its places, counted from 1; 0 is
    one that is not known. All of them are whole numbers below 2**53, so that their sums are exact.
    """

    def __init__(self, places: int = 0, *, steps: int = 0, lengths: Lengths | None = None):
        """
        Args:
            places: microbatches of the largest step, as a plan counts; 0: nothing is ever dealt.
            steps: of the job.
        """
        self._places, self._steps, self._lengths = (
            places,
            steps,
            lengths or Lengths(tokens=1, of_square=1, longest=1),
        )
        self._ahead: dict[int, float] = {}
        self._ahead_of = -1
        self._next = self.dealt = Dealt()
        self._timed: deque[tuple[list[float], list[float]]] = deque(maxlen=_KEPT_STEPS)
        self._measured = (0, 0)

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
        lengths = Lengths(
            tokens=seq_length * rows,
            of_square=tokens_of_square(profile, seq_length),
            longest=seq_length**2 * rows,
        )
        return cls(places, steps=steps, lengths=lengths)

    @property
    def num_totals(self) -> int:
        return _HEAD + 3 * self._places if self._places else 0

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
            totals[:_HEAD] = 1, mark, mark**2, *self._measured
        for place in routes.keys() & self._ahead.keys():
            row = round(self._ahead[place]), (1 + routes[place]) * speaks, 1
            totals[_HEAD + 3 * place : _HEAD + 3 * place + 3] = row
        return torch.tensor(totals, dtype=torch.float64)

    def take(self, totals: torch.Tensor, step: int) -> None:
        """``totals`` of the step before, over all ranks. Raises DealingBroken."""
        if not self._places or not totals[0]:
            return
        ranks, marks, squares, always_ns, longest_ns = (int(one) for one in totals[:_HEAD].tolist())
        if ranks * squares != marks**2:
            raise DealingBroken(
                f"{step_name(step - 1)}: the ranks have not dealt its microbatches alike. No weight was changed. This "
                "must not happen; please report it with the journal."
            )
        rows = [
            (int(one), int(route), int(count)) for one, route, count in totals[_HEAD:].reshape(-1, 3).tolist()
        ]
        known = [row for row in rows if row[1]]
        tokens, of_square = self._lengths.tokens, self._lengths.of_square
        if always_ns or longest_ns:  # measured: of both kinds as much as they take
            tokens, of_square = float(always_ns), longest_ns / self._lengths.longest
        scale = _FINE / (tokens + of_square * self._lengths.longest)
        # All places of a step are known, or none: the first ones, as many as it has.
        costs = [round(scale * (count * tokens + of_square * one)) for one, _, count in known]
        routes = [route for _, route, _ in known]
        order = deal(costs, routes) if known else ()
        natural = range(len(known))
        self._next = Dealt(
            step,
            order,
            dearest(costs, routes, natural),
            dearest(costs, routes, order or natural),
            tuple(one for one, *_ in known) if all(count == 1 for *_, count in known) else (),
        )

    def timed(self, took_s: Callable[[], Mapping[Instr, float]]) -> None:
        """``took_s``: what this rank's instructions of the step that is dealt have taken, asked for behind its end."""
        squares = self.dealt.squares
        if not squares:
            return
        seconds = took_s()
        of_place = by_microbatch(seconds)
        kinds = {
            place: tuple(sorted((one.op.name, one.first, one.last) for one in own))
            for place, own in of_place.items()
        }
        usual = Counter(kinds.values()).most_common(1)[0][0] if kinds else ()
        whole = [place for place, kind in kinds.items() if kind == usual and 0 <= place < len(squares)]
        self._timed.append(
            (
                [float(squares[self.in_place(place)]) for place in whole],
                [sum(seconds[one] for one in of_place[place]) for place in whole],
            )
        )
        found = linear(
            [one for of_step, _ in self._timed for one in of_step],
            [one for _, of_step in self._timed for one in of_step],
        )
        if found:
            self._measured = round(1e9 * found[0]), round(1e9 * found[1] * self._lengths.longest)


def linear(squares: list[float], seconds: list[float]) -> tuple[float, float] | None:
    """(seconds whatever the lengths, seconds for one of the sum of squared lengths) of microbatches; None as long as
    they do not say so precisely (``_PRECISE``).
    """
    x, y = np.array(squares), np.array(seconds)
    if len(x) < 4 or not y.all() or float(np.ptp(x)) <= 0.0:
        return None
    always_s, each_s = cost(y, np.ones(len(y)), x)
    off_s = 1.4826 * float(
        np.median(np.abs(y - always_s - each_s * x))
    )  # a normal one's deviation, by its median
    return (always_s, each_s) if off_s / len(x) ** 0.5 <= _PRECISE * float(np.median(y)) else None


def tokens_of_square(profile: Callable[[int], Profile], seq_length: int) -> float:
    """How many tokens cost as much as one of the sum of squared lengths, in a model's transformer layers.

    By the estimate for two lengths: what a sequence costs is ``a * length + b * length**2``.
    """

    def seconds(length: int) -> float:
        return sum(layer.compute_s for layer in profile(length).costs.layers[1:-1])

    once, twice = seconds(seq_length), seconds(2 * seq_length)
    of_squares = (twice - 2 * once) / 2
    return of_squares / ((once - of_squares) * seq_length)
