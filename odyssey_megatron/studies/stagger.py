"""Staggered steps: a worker starts the next step once its own gradients are reduced, not when all are."""

from __future__ import annotations

import math
from collections.abc import Mapping

from odyssey_megatron.plan.checking.simulate import reduce_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.scheduling.gathers import optimizers_s
from odyssey_megatron.plan.scheduling.reductions import reduction_order


def staggered_step_s(layout: Layout, costs: Costs, done_s: Mapping[int, float]) -> float:
    """Return the period of steps whose optimizer is staggered: a worker goes on once its own blocks are reduced.

    ``done_s``: worker -> when its last weight gradient ends in one step alone. Each worker repeats what is between its
    first forward and the end of its optimizer, and the holders of a block end its reduction together. The slowest
    worker sets the pace: warm-up and drain of neighbouring steps overlap. Source: ReCycle's staggered optimizer, arXiv
    2405.14009. This is an estimate for a steady state. No plan is executed like this, since here no optimizer runs
    before the agreement (I5).
    """
    start: dict[int, float] = {}
    own_s = optimizers_s(layout, layout.blocks(), costs)
    for route in layout.routes:
        reached = 0.0
        for hop in route.hops:
            start[hop.worker] = min(start.get(hop.worker, math.inf), reached)
            reached += costs.spans.forward_s(hop.first, hop.last) + costs.message_s()
    now = dict(done_s)
    for block in reduction_order(layout.blocks(), behind=layout.num_layers):
        end = max(now[worker] for worker in block.holders)
        end += reduce_s(costs, block.first, block.last, len(block.holders))
        now.update(dict.fromkeys(block.holders, end))
    return max(now[worker] + own_s.get(worker, 0.0) - first for worker, first in start.items())
