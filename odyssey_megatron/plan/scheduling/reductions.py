"""When gradients are summed over the holders of their layers: in buckets, beside the last weight gradients.

A worker's program ends with weight gradients, which nobody else waits for. They run bucket by bucket, and the sum of a
bucket starts when its last weight gradient is done. So after its first sum a worker sends and needs nothing but sums,
and whoever waits for a sum waits for what stands before it in some program: a schedule that was free of deadlocks
remains so.

If the last input gradient before them is that of a first stage, nobody waits for it either. Then what follows begins
while it runs, as soon as it has passed the layers of a bucket and one more (:class:`Tail`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.schedule import Op, Program
from odyssey_megatron.plan.scheduling.visits import INPUT_GRAD, WEIGHT_GRAD, Codes, Visits

BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_HOLDER = 40_000_000, 1_000_000
"""The least number of parameters that are summed at once is the larger of the two; the time of fewer would be mostly
latency. Source: megatron core_v0.16.1 core/distributed/distributed_data_parallel.py, default of ``bucket_size``.
"""

_GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, in float32."""


def buckets(layout: Layout, costs: Costs, alike: Mapping[int, int] | None = None) -> tuple[Block, ...]:
    """Return the blocks of ``layout`` cut into buckets, each of at least :func:`bucket_bytes` of gradients.

    A bucket has no more layers than needed for that. The lowest one of a block, which is done last, has what is left,
    and may have fewer bytes. ``alike``: see :func:`holders_of`.
    """
    return tuple(
        Block(first=a, last=b, holders=block.holders)
        for block in layout.blocks()
        for a, b in cut(block.first, block.last, holders_of(block, alike), costs)
    )


def holders_of(block: Block, alike: Mapping[int, int] | None = None) -> int:
    """Return the number of holders of ``block``.

    ``alike`` maps each worker to the number of workers that it stands for, including itself; 1 by default.
    """
    return sum(alike[worker] for worker in block.holders) if alike else len(block.holders)


def cut(first: int, last: int, holders: int, costs: Costs) -> list[tuple[int, int]]:
    """Return the buckets of layers ``[first, last)``, which ``holders`` workers hold."""
    return cut_in(first, last, bucket_bytes(costs, holders), costs)


def cut_in(first: int, last: int, least: int, costs: Costs) -> list[tuple[int, int]]:
    """Return the buckets of layers ``[first, last)``: all but the lowest have at least ``least`` bytes."""
    ends = [last]
    for layer in range(last - 1, first, -1):
        if costs.spans.gradient_bytes(layer, ends[-1]) >= least:
            ends.append(layer)
    return [*pairwise([first, *reversed(ends)])]


def bucket_bytes(costs: Costs, holders: int) -> int:
    """Return the least number of bytes of gradients that ``holders`` workers sum at once."""
    if costs.bucket_bytes is not None:
        return max(1, costs.bucket_bytes)
    return _GRADIENT_BYTES * max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_HOLDER * holders)


def buckets_of(programs: Iterable[Program], layout: Layout) -> tuple[Block, ...]:
    """Return the blocks of ``layout`` cut into the buckets that ``programs`` sum."""
    cuts = {
        edge
        for program in programs
        for instr in program
        if instr.op is Op.REDUCE_GRAD
        for edge in (instr.first, instr.last)
    }
    found = []
    for block in layout.blocks():
        inside = sorted(cut for cut in cuts if block.first < cut < block.last)
        edges = [block.first, *inside, block.last]
        found += [Block(first=a, last=b, holders=block.holders) for a, b in pairwise(edges)]
    return tuple(found)


def reduction_order(blocks: Sequence[Block], *, behind: int) -> tuple[Block, ...]:
    """Return ``blocks`` in the order in which all workers sum them.

    In ragged layouts neighbouring blocks share workers, so going through them in layer order would make one
    chain of them all. Blocks without a common holder get one colour and are summed at the same time, colour after
    colour. Source: Chameleon's colouring of the conflict graph (arXiv 2508.21613); a worker's layers are
    mostly one span, and on such interval graphs the greedy colouring in layer order is optimal. The tied
    weight, the layer ``behind`` all that routes go through, is coloured last: it is done with embedding and head.
    """
    used: dict[int, set[int]] = {}
    colours: list[tuple[int, Block]] = []
    for block in sorted(blocks, key=lambda one: (one.first < behind, one.first), reverse=True):
        taken = set().union(*(used.get(worker, ()) for worker in block.holders))
        colour = next(c for c in range(len(taken) + 1) if c not in taken)
        for worker in block.holders:
            used.setdefault(worker, set()).add(colour)
        colours.append((colour, block))
    return tuple(block for _, block in sorted(colours, key=lambda item: item[0]))


def with_reductions(programs: Codes, visits: Visits) -> Codes:
    """Return ``programs`` with the sum of each bucket after its last weight gradient, and ``STEP`` at the end.

    Holders without a microbatch (their gradient is zero) and single holders sum, too. All workers keep to one order of
    all buckets.
    """
    order = reduction_order(visits.buckets, behind=visits.layout.num_layers)
    sums: dict[int, list[int]] = {worker: [] for worker in visits.layout.workers}
    for block in order:
        for worker in block.holders:
            sums[worker].append(visits.bucket_at[block.first])
    return {
        worker: [*_with_sums(list(programs.get(worker, ())), own, visits), visits.step]
        for worker, own in sums.items()
    }


def _with_sums(program: list[int], own: Iterable[int], visits: Visits) -> list[int]:
    head = len(program) - tail_length(program, visits.reductions)
    out, tail = program[:head], program[head:]
    for bucket in own:
        out += [piece for code in tail if (piece := visits.piece(code >> 3, bucket)) >= 0]
        out.append(visits.reductions + bucket)
    return out


@dataclass(frozen=True)
class Tail:
    """The weight gradients that a worker's program ends with."""

    spans: tuple[tuple[int, int], ...]
    """Layers ``[first, last)`` of each."""
    speed: float
    lead: tuple[int, int] | None = None
    """Layers of the input gradient before them, if nobody waits for that; else None."""

    def left_s(self, costs: Costs, first: int) -> float:
        """Return how long the input gradient before them still takes when those from layer ``first`` on can run."""
        if self.lead is None or first >= len(costs.layers):  # the tied weight's is done with the embedding's
            return 0.0
        return costs.spans.input_grad_s(self.lead[0], until_passed(self.lead, first)) / self.speed

    def within_s(self, costs: Costs, first: int, last: int) -> float:
        """Return the time of their parts in layers ``[first, last)``."""
        seconds, weight_grad_s = 0.0, costs.spans.weight_grad_s
        for (start, stop), times in self._counted:
            low, high = max(start, first), min(stop, last)
            if low < high:
                seconds += times * weight_grad_s(low, high)
        return seconds / self.speed

    @cached_property
    def _counted(self) -> tuple[tuple[tuple[int, int], int], ...]:
        """Each span with the number of times that it occurs: dozens of microbatches have one or two spans."""
        return tuple(Counter(self.spans).items())


NO_TAIL = Tail((), 1.0)


def until_passed(lead: tuple[int, int], first: int) -> int:
    """Return the layer down to which an input gradient must have run so that layers from ``first`` on are done with.

    ``lead`` are the layers of the input gradient. It must have passed one layer below ``first``, since what a layer
    adds to gradients besides its input gradient may come a little later.
    """
    return lead[1] if first >= lead[1] else max(lead[0], first - 1)


def tail_length(program: Sequence[int], visits_end: int) -> int:
    """Return the number of weight gradients that ``program`` ends with; codes from ``visits_end`` on are no visits'."""
    at = len(program)
    while at and program[at - 1] < visits_end and program[at - 1] & 7 == WEIGHT_GRAD:
        at -= 1
    return len(program) - at


def lead_of(program: Sequence[int], visits: Visits) -> tuple[int, int] | None:
    """Return the layers of the input gradient before the weight gradients and sums at the end of ``program``.

    None: there is none, or somebody waits for it.
    """
    for code in reversed(program):
        if code < visits.reductions and code & 7 != WEIGHT_GRAD:
            visit, leads = code >> 3, code & 7 == INPUT_GRAD and visits.before[code >> 3] < 0
            return (visits.first[visit], visits.last[visit]) if leads else None
        if visits.eager <= code < visits.pieces:
            return None
    return None
