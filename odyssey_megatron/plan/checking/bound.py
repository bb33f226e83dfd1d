"""Lower bounds on the step time: how good any plan could be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import floor, gcd, inf
from typing import NamedTuple

from odyssey_megatron.plan.checking.simulate import sum_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Block, Hop, Layout, Route
from odyssey_megatron.plan.scheduling.gathers import ending_s
from odyssey_megatron.plan.scheduling.reductions import buckets, until_passed
from odyssey_megatron.plan.scheduling.tasks import TICKS_PER_S

_ROUNDING = 1 + 1e-9
"""Allows for rounding where a time should be a whole multiple of another."""


def lower_bound_s(
    layout: Layout,
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
    in_flight_cap: Mapping[int, int] | None = None,
) -> float:
    """Return a time that no step of any schedule of ``layout`` is shorter than.

    It is the maximum of these terms over workers and routes, after which all step, and wait for weights
    (:mod:`odyssey_megatron.plan.scheduling.gathers`):

    - *Work*: a worker cannot start before the first activation can reach it, and then has all its forwards, input and
      weight gradients to do.
    - *Drain*: all its forwards and input gradients come before the last gradient leaves it, which then goes up to the
      first stage. Each worker on that way still has a weight gradient to do, and to sum those of its buckets that have
      a layer of it, one after the other, each once its part of the weight gradient is done.
    - *Path*: a microbatch goes down, up again, and ends with a weight gradient.
    - *Sums*: a worker sums its buckets one after the other, after all its forwards and input gradients (on a first
      stage the last input gradient may still run), and one bucket after all that it computes.
    - *Memory*, if ``in_flight_cap`` (worker -> bytes of activations) is given: each microbatch keeps its bytes on a
      worker at least while it goes down to the head and up again, and bytes times seconds fit into the cap times the
      step (Little's law).
    """
    return Bound(layout, costs, speeds).with_caps(in_flight_cap or {})


class Bound:
    """:func:`lower_bound_s` of one layout for any caps: most of it does not depend on them."""

    def __init__(self, layout: Layout, costs: Costs, speeds: Mapping[int, float] | None = None) -> None:
        cut = buckets(layout, costs)
        self._sums = _sums(layout, cut, costs)
        self._work = _Work(layout, costs, speeds or {}, self._sums)
        self._ending_s = ending_s(layout, cut, costs)

    def with_caps(self, in_flight_cap: Mapping[int, int]) -> float:
        """Return the bound. ``in_flight_cap``: worker -> bytes of activations; empty: any number."""
        visits = self._work.visits
        # Deduplicated, since most workers are in the same place as others.
        places = {
            (visits.get(worker), in_flight_cap.get(worker, 0), own) for worker, own in self._sums.items()
        }
        return max(self._work.path_s, *(_worker_s(*place) for place in places)) + self._ending_s


def cluster_bound_s(
    num_microbatches: int, costs: Costs, workers: Sequence[int], speeds: Mapping[int, float] | None = None
) -> float:
    """Return a time that no step of any layout over ``workers`` is shorter than, however layers are spread and cut.

    It is the larger of two: all work divided by all speeds, given that a layer of a microbatch cannot be cut in two;
    and one microbatch's way down, up again and to the weight gradient of the first layer, all on the fastest worker.
    Memory, messages, reductions and the wait for the first activation are not counted.
    """
    speed = [(speeds or {}).get(worker, 1.0) for worker in workers]
    last = len(costs.layers)
    once = costs.spans.compute_s(0, last)
    path = costs.spans.down_and_up_s(0, last) + costs.layers[0].weight_grad_s
    work = num_microbatches * once / sum(speed)
    return max(work, path / max(speed), *_in_pieces_s(num_microbatches, costs, speed)) + costs.agreement_s


def _in_pieces_s(num_microbatches: int, costs: Costs, speed: Sequence[float]) -> Iterator[float]:
    """Yield lower bounds on the time of all work, each measured in units of another size.

    Only whole units of each layer and of each worker's time count: a worker's layers cannot have more units together
    than its time has.
    """
    shortest = min((one.compute_s for one in costs.layers[1:-1] if one.compute_s), default=0.0)
    how_many = Counter(speed)
    for parts in (1, 2, 4) if shortest else ():  # several: embedding and head are no multiples of a layer
        unit = shortest / parts
        units = num_microbatches * sum(int(one.compute_s / unit * _ROUNDING) for one in costs.layers)
        low, high = units / sum(speed), (units + len(speed)) / sum(speed)
        if len(how_many) == 1:
            low = -(-units // len(speed)) / speed[0]
        else:
            for _ in range(40):
                middle = (low + high) / 2
                done = sum(count * int(middle * one * _ROUNDING) for one, count in how_many.items())
                low, high = (low, middle) if done >= units else (middle, high)
        yield low * unit


def _least_s(seconds: float) -> float:
    """Return ``seconds`` in whole ticks (:mod:`odyssey_megatron.plan.scheduling.tasks`), rounded down; schedules may
    round up.
    """
    return floor(seconds * TICKS_PER_S + 1e-3) / TICKS_PER_S


_Sums = tuple[tuple[int, int, float], ...]
"""(first layer, last, seconds) of the sum of each of a worker's buckets."""


def _sums(layout: Layout, cut: Sequence[Block], costs: Costs) -> dict[int, _Sums]:
    """Return each worker's sums; one object for workers that have the same."""
    found: dict[int, list[tuple[int, int, float]]] = {worker: [] for worker in layout.workers}
    for bucket in cut:
        one = bucket.first, bucket.last, sum_s(costs, bucket, layout.copies)
        for worker in bucket.holders:
            found[worker].append(one)
    alike: dict[_Sums, _Sums] = {}
    return {worker: alike.setdefault(tuple(own), tuple(own)) for worker, own in found.items()}


class _Alike(NamedTuple):
    """Visits to a worker that all take the same time and memory."""

    number: int
    each_bytes: int
    forward_s: float
    weight_grad_s: float
    stays_s: float
    """The least time for which a visit keeps its bytes."""

    def through_s(self, cap: int) -> float:
        """Return the least time from the first forward to the last weight gradient with ``cap`` bytes.

        As many visits as fit are there at once, each in a place of its own. The first ones in these places begin one
        forward after the other, and the last ones end a weight gradient after the other.
        """
        places = min(self.number, cap // self.each_bytes)
        apart_s = (self.forward_s + self.weight_grad_s) * (places - 1) / 2
        return self.number * self.stays_s / places + apart_s


class _Visits(NamedTuple):
    """What the visits to one worker take together."""

    head_s: float
    """The earliest time at which it can start."""
    tail_s: float
    """The shortest time from its last input gradient to the end of a route's backward, and of the sums behind it."""
    drain_s: float
    """Time of all its forwards and input gradients."""
    weight_grads_s: float
    byte_s: float
    """Sum of bytes of activations times the least time for which they stay."""
    portion: int
    """Greatest common divisor of the visits' bytes: a cap's remainder below it is of no use."""
    beside_s: float
    """The longest input gradient that nobody waits for."""
    back_s: float
    """The earliest time at which an input gradient can start."""
    fills_s: float
    """Time of a forward for each byte that it fills, at most."""
    empties_s: float
    """Time of a weight gradient for each byte that it frees, at most."""
    alike: _Alike | None
    """The visits, if the worker is only visited at one place of one route; else None."""

    @classmethod
    def joined(cls, several: Sequence[_Visits]) -> _Visits:
        if len(several) == 1:
            return several[0]
        (
            head_s,
            tail_s,
            drain_s,
            weight_grads_s,
            byte_s,
            portion,
            beside_s,
            back_s,
            fills_s,
            empties_s,
            _,
        ) = zip(*several, strict=True)  # a column at a time is three times as fast
        return cls(
            head_s=min(head_s),
            tail_s=min(tail_s),
            drain_s=sum(drain_s),
            weight_grads_s=sum(weight_grads_s),
            byte_s=sum(byte_s),
            portion=gcd(*portion),
            beside_s=max(beside_s),
            back_s=min(back_s),
            fills_s=max(fills_s),
            empties_s=max(empties_s),
            alike=None,
        )


class _Work:
    """The work of each worker, worked out once for each kind of route."""

    def __init__(
        self, layout: Layout, costs: Costs, speeds: Mapping[int, float], sums: Mapping[int, _Sums]
    ) -> None:
        self.costs, self.speeds, self.lag, self.sums = costs, speeds, _least_s(costs.message_s()), sums
        self.path_s = 0.0
        """The longest way of a microbatch down and up again, to its last weight gradient."""
        known: dict[tuple[object, ...], list[_Visits]] = {}
        several: dict[int, list[_Visits]] = defaultdict(list)
        for route in layout.routes:
            if not route.microbatches:
                continue
            at_speed = [speeds.get(hop.worker, 1.0) for hop in route.hops] if speeds else ()
            own = (id(sums[hop.worker]) for hop in route.hops)
            kind = (len(route.microbatches), *route.spans, *at_speed, *own)
            if kind not in known:
                known[kind] = self._of(route)
            for hop, visits in zip(route.hops, known[kind], strict=True):
                several[hop.worker].append(visits)
        self.visits = {worker: _Visits.joined(found) for worker, found in several.items()}
        """Worker -> its visits; without workers that have no microbatch."""

    def _times(self, route: Route) -> list[tuple[float, float, float]]:
        """Return the times (forward, input gradient, weight gradient) of each hop, at its worker's speed."""
        out, spans = [], self.costs.spans
        for hop in route.hops:
            at, speed = (hop.first, hop.last), self.speeds.get(hop.worker, 1.0)
            kinds = (spans.forward_s(*at), spans.input_grad_s(*at), spans.weight_grad_s(*at))
            out.append((_least_s(kinds[0] / speed), _least_s(kinds[1] / speed), _least_s(kinds[2] / speed)))
        return out

    def _of(self, route: Route) -> list[_Visits]:
        """Return the visits to the worker of each hop of ``route``."""
        count, head, tail, found = len(route.microbatches), 0.0, 0.0, []
        times, spans = self._times(route), self.costs.spans
        down_and_up = sum(f + i + 2 * self.lag for f, i, _ in times) - 2 * self.lag
        self.path_s = max(self.path_s, down_and_up + times[0][2])
        for hop, (forward, input_grad, weight_grad) in zip(route.hops, times, strict=True):
            tail = max(tail, self._behind_s(hop))
            early = spans.early_bytes(hop.first, hop.last)
            whole = spans.activation_bytes(hop.first, hop.last)
            late = whole - early
            stays = down_and_up + (weight_grad if late else 0.0)
            found.append(
                _Visits(
                    head_s=head,
                    tail_s=tail,
                    drain_s=count * (forward + input_grad),
                    weight_grads_s=count * weight_grad,
                    byte_s=count * (early * down_and_up + late * (down_and_up + weight_grad)),
                    portion=gcd(early, late),
                    beside_s=0.0 if hop.first else input_grad,
                    back_s=head + down_and_up - input_grad,
                    fills_s=forward / whole if whole else inf,
                    empties_s=weight_grad / late if late else inf,
                    alike=_Alike(count, whole, forward, weight_grad, stays) if late and not early else None,
                )
            )
            down_and_up -= forward + input_grad + 2 * self.lag
            head += forward + self.lag
            # After this worker's last input gradient comes that of the hop before, and so on up to the first hop.
            tail += self.lag + input_grad
        return found

    def _behind_s(self, hop: Hop) -> float:
        """Return the least time from an input gradient's end at ``hop`` until its worker has done, and summed, the
        weight gradient that follows.

        On a first stage nobody waits for the input gradient, so that a sum may begin while it still runs
        (:class:`odyssey_megatron.plan.scheduling.reductions.Tail`).
        """
        spans, speed = self.costs.spans, self.speeds.get(hop.worker, 1.0)
        whole_s = spans.weight_grad_s(hop.first, hop.last) / speed
        least_s, ready = _least_s(whole_s), list[tuple[float, float]]()
        for first, last, seconds in self.sums[hop.worker]:
            if first < hop.last and hop.first < last:
                part_s = spans.weight_grad_s(max(first, hop.first), min(last, hop.last))
                runs_s = 0.0 if hop.first else spans.input_grad_s(0, until_passed((0, hop.last), first))
                ready.append(((part_s - runs_s) / speed - (whole_s - least_s), seconds))
        behind_s, summed_s = least_s, 0.0
        for ready_s, seconds in sorted(ready, reverse=True):  # none so far begins before ``ready_s``
            summed_s += seconds
            behind_s = max(behind_s, ready_s + summed_s)
        return behind_s


def _worker_s(visits: _Visits | None, cap: int, sums: _Sums) -> float:
    """Return the least time until a worker is through with its ``visits`` and ``sums``."""
    sums_s = [seconds for _, _, seconds in sums]
    if visits is None:
        return sum(sums_s)
    done, computed_s, drained_s = visits.head_s + visits.drain_s, 0.0, 0.0
    cap -= cap % visits.portion if visits.portion else cap
    if cap:
        # Before the first input gradient the worker can only fill the cap, and after the last one only empty it.
        waits_s = max(0.0, visits.back_s - visits.head_s - visits.fills_s * cap)
        behind_s = max(0.0, visits.tail_s - visits.empties_s * cap)
        busy_s = visits.drain_s + visits.weight_grads_s
        through_s = visits.alike.through_s(cap) if visits.alike else visits.byte_s / cap
        computed_s = visits.head_s + max(waits_s + busy_s, through_s)
        drained_s = visits.head_s + waits_s + busy_s + behind_s
    computed_s = max(done + visits.weight_grads_s, computed_s)
    summed_s = done - visits.beside_s + sum(sums_s)
    return max(computed_s + min(sums_s), summed_s, done + visits.tail_s, drained_s, sum(sums_s))
