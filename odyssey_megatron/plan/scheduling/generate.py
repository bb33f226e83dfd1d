"""The one generator of schedules: a compute order from list scheduling, lowered by passes."""

from __future__ import annotations

from collections.abc import Mapping

from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import Schedule
from odyssey_megatron.plan.scheduling.messages import with_messages
from odyssey_megatron.plan.scheduling.order import Order, independent, order_routes
from odyssey_megatron.plan.scheduling.reductions import buckets, with_reductions
from odyssey_megatron.plan.scheduling.visits import Visits

__all__ = ["Order", "build_schedule", "independent", "lower", "order_routes"]


def build_schedule(
    layout: Layout,
    costs: Costs,
    *,
    in_flight_cap: Mapping[int, int] | None = None,
    speeds: Mapping[int, float] | None = None,
) -> Schedule:
    """Return the program of every worker for one step of ``layout``.

    Arguments and errors are those of :func:`odyssey_megatron.plan.scheduling.order.order_routes`. For whole plans of
    large jobs use :func:`odyssey_megatron.plan.scheduling.assemble.assemble`, which gives the same programs as text.
    """
    order = order_routes(layout, costs, in_flight_cap=in_flight_cap, speeds=speeds)
    return lower(order, layout, costs)


def lower(order: Order, layout: Layout, costs: Costs) -> Schedule:
    """Return the schedule of a compute order, with messages, sums and ``STEP``."""
    visits = Visits(layout, buckets(layout, costs))
    lowered = with_reductions(with_messages(visits.encode(order.schedule()), visits), visits)
    return Schedule(programs=tuple((worker, visits.decode(codes)) for worker, codes in lowered.items()))
