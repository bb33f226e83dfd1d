"""``--odyssey-sequence-balance``: which microbatch of a step goes to which place of the plan, where samples are packed.

The ranks that compute heads look up, before the end of a step, how long the sequences of the next one are. The lengths
travel with the step's agreement. So all ranks know them, also those that finish the step by themselves or join after
it, and each works out the same dealing (``plan/scheduling/dealing.py``), which holds for all of that step, whoever dies
in it. Data, randomness and losses depend on a microbatch's number in the step, which does not change; only its place
does. The first step of a job, and the first after loading a checkpoint, is in natural order.

The cost of a sequence by its length is estimated until ranks have measured it. The measured times by squared lengths
travel with the agreement, too, so that all ranks use the same sums.
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
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import Instr, by_microbatch
from odyssey_megatron.plan.scheduling.dealing import deal, dearest
from odyssey_megatron.policy.costs.profile import Profile

_FINE = 2**30
"""Cost of the most expensive microbatch possible on one rank; all costs are whole numbers, scaled to this."""
_KEPT_STEPS = 8
"""Number of measured steps from which a rank estimates what its microbatches take."""
_PRECISE = 0.01
"""Ranks report what lengths cost only once its standard error is at most this share of a microbatch's time."""
_HEAD = 5
"""Number of totals before those of places."""


class DealingBroken(OdysseyError):
    """Ranks have computed a step by different dealings: a bug. The job must stop rather than train on."""


class Dealt(NamedTuple):
    """The dealing of a step. A route's share is what it would cost if all microbatches cost the same."""

    step: int = -1
    order: tuple[int, ...] = ()
    """For each place the number of the microbatch in it; empty: each is in the place of its own number."""
    natural: float = 1.0
    """Cost of the most expensive route in natural order, as a multiple of its share."""
    dearest: float = 1.0
    """Cost of the most expensive route as dealt, as a multiple of its share."""
    squares: tuple[int, ...] = ()
    """For each microbatch, by its number in the step, the sum of its squared lengths; empty where several ranks compute
    microbatches for one place.
    """

    @property
    def mark(self) -> int:
        """A checksum of the order, small enough for sums of its square to be exact."""
        return zlib.crc32(repr(self.order).encode()) >> 13


def heads(layout: Layout, worker: int, size: int) -> dict[int, int]:
    """The microbatches whose heads ``worker`` computes, among a plan's first ``size``; maps each to the first of its
    route.
    """
    return {
        one: route.microbatches[0]
        for route in layout.routes
        if route.hops[-1].worker == worker
        for one in route.microbatches
        if one < size
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What the cost of microbatches depends on.

    Args:
        tokens: the number of tokens of one rank's microbatch.
        of_square: the number of tokens that cost as much as 1 in the sum of squared lengths, by the estimate.
        longest: the largest possible sum of squared lengths.
    """

    tokens: float
    of_square: float
    longest: float


class Balance:
    """Deals microbatches to places. Its state is the same on all ranks, except for what a rank's own microbatches have
    taken.

    Its totals of a step, summed over ranks, are: the number of ranks, the marks of their dealings, the squares of these
    marks, the nanoseconds that a microbatch takes whatever its lengths, the additional nanoseconds of one with
    ``Lengths.longest``; then, for each place of the next step, (sum of squared lengths of the microbatch with its
    number, route, number of microbatches). A route is identified by the first of its places, counted from 1; 0:
    unknown. All totals are whole numbers below 2**53, so that their sums are exact.
    """

    def __init__(self, places: int = 0, *, steps: int = 0, lengths: Lengths | None = None):
        """
        Args:
            places: the number of microbatches of the largest step, as a plan counts; 0: nothing is ever dealt.
            steps: the number of steps of the job.
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
        """The balance that ``settings`` ask for.

        Args:
            is_packed: samples are packed sequences.
            speaks: this rank tells the user if there is nothing to do.
            rows: the number of rows of a microbatch, each of ``seq_length`` tokens.
            profile: maps a sequence length to the expected costs of such a model.
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
        """From now on microbatches are those of ``step``, which may have begun before; -1: of an evaluation."""
        self.dealt = self._next if self._next.step == step else Dealt(step)

    def in_place(self, place: int) -> int:
        """The microbatch in that place."""
        return self.dealt.order[place] if self.dealt.order else place

    @property
    def seen(self) -> tuple[float, float] | None:
        """The costs of the most expensive route, as multiples of its share, in natural order and as dealt; None if
        unknown.
        """
        return (self.dealt.natural, self.dealt.dearest) if self.dealt.order else None

    def look_ahead(self, step: int, places: Iterable[int], squares: Callable[[int], float]) -> None:
        """Look up what is not known yet of ``places`` of ``step``; ``squares`` maps a microbatch's number to its sum of
        squared lengths.
        """
        if step != self._ahead_of:
            self._ahead, self._ahead_of = {}, step
        if self._places and step < self._steps:
            self._ahead |= {one: squares(one) for one in places if one not in self._ahead}

    def local_totals(self, routes: Mapping[int, int], *, speaks: bool) -> torch.Tensor:
        """This rank's share of the totals, 1-D, float64, on the host.

        It is known after :meth:`look_ahead` at the places of ``routes``.

        Args:
            routes: the places of the next step whose head this rank computes, each with the first place of its route.
            speaks: this rank reports the routes for its cell.
        """
        totals, mark = [0] * self.num_totals, self.dealt.mark
        if totals:
            totals[:_HEAD] = 1, mark, mark**2, *self._measured
        for place in routes.keys() & self._ahead.keys():
            row = round(self._ahead[place]), (1 + routes[place]) * speaks, 1
            totals[_HEAD + 3 * place : _HEAD + 3 * place + 3] = row
        return torch.tensor(totals, dtype=torch.float64)

    def take(self, totals: torch.Tensor, step: int) -> None:
        """Take the ``totals`` of the step before ``step`` over all ranks, 1-D, and deal ``step``.

        Raises DealingBroken.
        """
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
        if always_ns or longest_ns:  # measured: their ratio counts, so sums over ranks will do
            tokens, of_square = float(always_ns), longest_ns / self._lengths.longest
        scale = _FINE / (tokens + of_square * self._lengths.longest)
        # Either all places of a step are known or none, and they are the first ones.
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
        """Learn from the times of this rank's instructions in the current step; ``took_s`` is called after the step's
        end.
        """
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
    """(seconds whatever the lengths, seconds per unit of the sum of squared lengths) of microbatches; None while the
    data is too imprecise (``_PRECISE``).
    """
    x, y = np.array(squares), np.array(seconds)
    if len(x) < 4 or not y.all() or float(np.ptp(x)) <= 0.0:
        return None
    always_s, each_s = cost(y, np.ones(len(y)), x)
    off_s = 1.4826 * float(
        np.median(np.abs(y - always_s - each_s * x))
    )  # standard deviation of a normal distribution, from its median
    return (always_s, each_s) if off_s / len(x) ** 0.5 <= _PRECISE * float(np.median(y)) else None


def tokens_of_square(profile: Callable[[int], Profile], seq_length: int) -> float:
    """The number of tokens that cost as much as 1 in the sum of squared lengths, in a model's transformer layers.

    Derived from the estimates for two lengths: the cost of a sequence is ``a * length + b * length**2``.
    """

    def seconds(length: int) -> float:
        return sum(layer.compute_s for layer in profile(length).costs.layers[1:-1])

    once, twice = seconds(seq_length), seconds(2 * seq_length)
    of_squares = (twice - 2 * once) / 2
    return of_squares / ((once - of_squares) * seq_length)
