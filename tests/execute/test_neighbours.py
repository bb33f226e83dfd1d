"""Who times messages with whom, and in which order: of plans as the workers know them."""

from __future__ import annotations

import pytest

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.cluster.state import initial_state
from odyssey_megatron.codec import from_json
from odyssey_megatron.execute.channels import Channels
from odyssey_megatron.execute.neighbours import Neighbours
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.sending.generation import Generation
from odyssey_megatron.plan.sending.wire import Head, WorkerPart, from_wire, to_wire
from odyssey_megatron.policy.decide import scheduled
from odyssey_megatron.policy.routes.links import around
from odyssey_megatron.policy.routes.rerouting import reroute
from tests.policy.test_decide import PROFILE
from tests.policy.test_links import slow


def orders(layout, workers: int) -> dict[int, list[int]]:
    plan = scheduled("test", layout, (), initial_state(nodes=(0,) * workers), PROFILE)
    generation = Generation(
        number=1,
        members=tuple(range(workers)),
        dead=(),
        why="",
        previous=layout,
        plan=plan,
        plan_hash="",
    )
    sent, found = to_wire(generation, 1), {}
    for worker, text in sent.parts.items():
        part = from_json(WorkerPart, text)
        own = from_wire(from_json(Head, sent.head), worker, part, sent.templates[part.template]).plan
        cells = Cells(Cell(rank=worker))
        channels = Channels({}, cells=cells, num_layers=layout.num_layers, tagged=True)
        neighbours = Neighbours(
            own.program(worker), own.layout, cells, channels, lambda first, last: ({0: None}, None)
        )
        found[worker] = [*neighbours.order]
    return found


def rounds(order: dict[int, list[int]]) -> int:
    """How often some links are at work at once until all have been; fails if somebody waits for ever."""
    left, count = {worker: [*peers] for worker, peers in order.items()}, 0
    while any(left.values()):
        ready = [(a, of[0]) for a, of in left.items() if of and left[of[0]] and left[of[0]][0] == a]
        assert ready, left
        for worker, _ in ready:
            left[worker].pop(0)
        count += 1
    return count


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_other_link_of_a_pipeline_at_once(stages):
    found = orders(
        megatron_layout(num_layers=10, pipeline_size=stages, num_workers=12, num_microbatches=12), 12
    )
    pipelines = 12 // stages
    assert sum(map(len, found.values())) == 2 * pipelines * (stages - 1)
    assert all(worker in found[peer] for worker, peers in found.items() for peer in peers)
    assert rounds(found) == min(2, stages - 1)


def test_nobody_waits_in_a_circle():
    """Where routes go criss-cross, and pipelines are cut in other places."""
    layout = megatron_layout(num_layers=10, pipeline_size=4, num_workers=12, num_microbatches=12)
    for dead in (1, 4, 11):
        alive = [worker for worker in range(12) if worker != dead]
        rerouted = reroute(layout, alive, PROFILE.costs)
        criss_cross = around(rerouted, slow((0, 3), (5, 8), (8, 10)))
        for one in (rerouted, criss_cross):
            assert rounds(orders(one, 12)) <= 2 * 11


def test_who_has_nobody_to_exchange_with():
    found = orders(megatron_layout(num_layers=10, pipeline_size=1, num_workers=3, num_microbatches=6), 3)
    assert not any(found.values())
