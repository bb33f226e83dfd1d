"""Lower bounds on the step time: how good a plan could be at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.gathers import weights_late_s
from odyssey_megatron.plan.layout import Layout, Route
from odyssey_megatron.plan.reductions import buckets
from odyssey_megatron.plan.simulate import reduce_s


def lower_bound_s(
    layout: Layout,
    costs: Costs,
    speeds: Mapping[int, float] | None = None,
    in_flight_cap: Mapping[int, int] | None = None,
) -> float:
    """No schedule of ``layout`` has a shorter step.

    Terms, maximised over workers and routes. *Work*: a worker cannot start before the first activation can
    reach it, and has all its forwards, input and weight gradients to do. *Drain*: all its forwards and
    input gradients come before the last gradient leaves it, which then goes up to the first stage.
    *Path*: a microbatch goes down, up again and ends with a weight gradient. *Sums*: a worker sums its buckets one
    after the other behind all its forwards and input gradients, of which on a first stage the last one may run on
    beside, and one of them behind all that it computes. Then all step, and wait for weights
    (:mod:`odyssey_megatron.plan.gathers`). *Memory*, if ``in_flight_cap`` (worker -> bytes of activations) is given:
    each microbatch keeps its bytes on a worker at least while it goes down to the head and up again, and bytes times
    seconds fit into the cap times the step (Little's law).
    """
    work = _Work(layout, costs, speeds or {}, in_flight_cap or {})
    sums = _sums_s(layout, costs)
    longest = max((sum(own) for own in sums.values()), default=0.0)
    each = (work.worker_s(worker, sums[worker]) for worker in layout.workers)
    late_s = weights_late_s(layout, buckets(layout, costs), costs)
    return max(work.path_s, longest, *each) + costs.optimizer_s + late_s


def cluster_bound_s(
    num_microbatches: int, costs: Costs, workers: Sequence[int], speeds: Mapping[int, float] | None = None
) -> float:
    """No layout over ``workers`` has a shorter step, however the layers are spread and cut.

    All work over all speeds; and one microbatch down, up again and to the weight gradient of the first layer, all on
    the fastest worker. Memory, messages, reductions and the wait for the first activation would come on top.
    """
    speed = [(speeds or {}).get(worker, 1.0) for worker in workers]
    last = len(costs.layers)
    once = costs.spans.compute_s(0, last)
    path = costs.spans.down_and_up_s(0, last) + costs.layers[0].weight_grad_s
    return max(num_microbatches * once / sum(speed), path / max(speed)) + costs.optimizer_s


def _sums_s(layout: Layout, costs: Costs) -> dict[int, list[float]]:
    """Of each worker, how long each of its buckets takes."""
    found: dict[int, list[float]] = {worker: [] for worker in layout.workers}
    for bucket in buckets(layout, costs):
        seconds = reduce_s(costs, bucket.first, bucket.last, len(bucket.holders), layout.copies)
        for worker in bucket.holders:
            found[worker].append(seconds)
    return found


class _Work:
    """Per worker: what it has to do, the earliest it can start, and the shortest way on after it."""

    def __init__(
        self, layout: Layout, costs: Costs, speeds: Mapping[int, float], caps: Mapping[int, int]
    ) -> None:
        self.costs, self.speeds, self.lag = costs, speeds, costs.message_s()
        self.caps = caps
        self.byte_s: dict[int, float] = {}
        """Worker -> bytes of activations times the seconds that they stay at the least."""
        self.portion: dict[int, int] = {}
        """Worker -> greatest common divisor of its visits' bytes: what is left of a cap below it is of no use."""
        self.head: dict[int, float] = {}
        self.tail: dict[int, float] = {}
        self.until_drain: dict[int, float] = {}
        self.beside: dict[int, float] = {}
        """The longest input gradient that nobody waits for."""
        self.weight_grads: dict[int, float] = {}
        self.path_s = 0.0
        """Of one microbatch, down and up and to its last weight gradient."""
        for route in layout.routes:
            if route.microbatches:
                self._add(route)

    def times(self, route: Route) -> list[tuple[float, float, float]]:
        """(forward, input gradient, weight gradient) of each hop, at its worker's speed."""
        out, spans = [], self.costs.spans
        for hop in route.hops:
            at, speed = (hop.first, hop.last), self.speeds.get(hop.worker, 1.0)
            kinds = (spans.forward_s(*at), spans.input_grad_s(*at), spans.weight_grad_s(*at))
            out.append((kinds[0] / speed, kinds[1] / speed, kinds[2] / speed))
        return out

    def _add(self, route: Route) -> None:
        count, head, tail = len(route.microbatches), 0.0, 0.0
        times = self.times(route)
        down_and_up = sum(f + i + 2 * self.lag for f, i, _ in times) - 2 * self.lag
        self.path_s = max(self.path_s, down_and_up + times[0][2])
        for hop, (forward, input_grad, weight_grad) in zip(route.hops, times, strict=True):
            worker = hop.worker
            if not hop.first:
                self.beside[worker] = max(self.beside.get(worker, 0.0), input_grad)
            early = self.costs.spans.early_bytes(hop.first, hop.last)
            late = self.costs.spans.activation_bytes(hop.first, hop.last) - early
            self.byte_s[worker] = self.byte_s.get(worker, 0.0) + count * (
                early * down_and_up + late * (down_and_up + weight_grad)
            )
            self.portion[worker] = gcd(self.portion.get(worker, 0), early, late)
            down_and_up -= forward + input_grad + 2 * self.lag
            self.head[worker] = min(self.head.get(worker, head), head)
            self.tail[worker] = min(self.tail.get(worker, tail), tail)
            drain = self.until_drain.get(worker, 0.0)
            self.until_drain[worker] = drain + count * (forward + input_grad)
            self.weight_grads[worker] = self.weight_grads.get(worker, 0.0) + count * weight_grad
            head += forward + self.lag
            # Behind this worker's last input gradient comes that of the hop before, and so on; the hop that
            # ends the way still owes a weight gradient.
            tail = self.lag + input_grad + max(tail, weight_grad)

    def worker_s(self, worker: int, sums_s: list[float]) -> float:
        if worker not in self.head:
            return sum(sums_s)
        done = self.head[worker] + self.until_drain[worker]
        cap, portion = self.caps.get(worker, 0), self.portion[worker]
        cap -= cap % portion if portion else cap
        memory_s = self.head[worker] + self.byte_s[worker] / cap if cap else 0.0
        computed_s = max(done + self.weight_grads[worker], memory_s)
        sums = done - self.beside.get(worker, 0.0) + sum(sums_s)
        return max(computed_s + min(sums_s), sums, done + self.tail[worker])
