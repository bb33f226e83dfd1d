from dataclasses import replace

import pytest

from odyssey_megatron.errors import LayersLost
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.transfer import (
    assign_seats,
    cheapest_assignment,
    greedy_assignment,
    plan_transfers,
    transfer_s,
)
from odyssey_megatron.plan.plan import Transfer
from tests.plan.samples import uniform_costs


def layout(*holders):
    return Layout(holders=holders, routes=())


def test_kuhn_munkres_of_the_paper():
    """Chameleon Fig. 3 (arXiv 2508.21613): the best assignment moves two layers."""
    cost = [[0, 1, 2, 3], [2, 1, 0, 3], [2, 2, 2, 0], [2, 2, 2, 3]]
    columns = cheapest_assignment(cost)
    assert sorted(columns) == [0, 1, 2, 3]
    assert sum(cost[row][column] for row, column in enumerate(columns)) == 2


def test_greedy_assignment_covers_each_row_once():
    alike, other = [0, 1, 2, 2], [2, 2, 0, 1]
    columns = greedy_assignment([alike, alike, other])
    assert len(set(columns)) == 3
    assert columns == (0, 1, 2)


def test_seats_move_the_fewest_bytes():
    """Two pipelines of three stages and six layers lose worker 4: 3 + 2 stages remain."""
    held = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3), 5: (4, 5)}
    seats = [(0, 1), (2, 3), (4, 5), (0, 1, 2), (3, 4, 5)]
    seated = assign_seats(seats, sorted(held), held, uniform_costs(6))
    assert sorted(seated) == sorted(held)
    moved = sum(len(set(seat) - set(held[w])) for seat, w in zip(seats, seated, strict=True))
    assert moved == 1 + 2


def test_transfers_cover_what_is_missing_and_balance_senders():
    before = layout((0, 1), (0, 1), (0, 1), (0, 1))
    after = layout((0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2))
    transfers = plan_transfers(before, after, [0, 1, 2], uniform_costs(4))
    assert {(t.layer, t.target) for t in transfers} == {(layer, 2) for layer in range(4)}
    assert sorted(t.source for t in transfers) == [0, 0, 1, 1]


def test_only_the_living_send():
    before, after = layout((0, 1), (0, 1)), layout((1, 2), (1, 2))
    transfers = plan_transfers(before, after, [1, 2], uniform_costs(2))
    assert transfers == (
        Transfer(layer=0, source=1, target=2),
        Transfer(layer=1, source=1, target=2),
    )


def test_lost_layers_are_named():
    with pytest.raises(LayersLost) as caught:
        plan_transfers(layout((0, 1), (2,), (2,)), layout((0,), (0,), (0,)), [0, 1], uniform_costs(3))
    assert (caught.value.layers, caught.value.ranks) == ((1, 2), (2,))
    assert "no holder is left of layer 1 and the head: rank(s) [2] had it" in str(caught.value)
    assert "more data parallelism or --odyssey-redundancy state" in str(caught.value)


def test_lost_optimizer_state_has_another_remedy_than_lost_layers():
    """The holders that are left have the weights alone: more data parallelism would change nothing."""
    holders = layout((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3))
    shared = replace(holders, keepers=((0, 2, 1, 3), (2, 3, 0, 1), (3, 2, 1, 0)), copies=2)
    with pytest.raises(LayersLost) as caught:
        plan_transfers(shared, layout((0,), (0,), (0,)), [0, 1], uniform_costs(3))
    assert (caught.value.layers, caught.value.ranks) == ((1, 2), (2, 3))
    assert "no copy of the optimizer state is left of layer 1 and the head" in str(caught.value)
    assert "with --odyssey-redundancy-level 2: it keeps 3 copies" in str(caught.value)
    assert "data parallelism" not in str(caught.value)


def test_many_seats_are_assigned_by_kind():
    """300 pipelines of two stages lose one worker; kinds are few, so the greedy assignment is exact here."""
    held = {worker: (worker % 2,) for worker in range(600) if worker != 4}
    seats = [(0,), (1,)] * 299 + [(0, 1)]
    seated = assign_seats(seats, sorted(held), held, uniform_costs(2))
    assert sorted(seated) == sorted(held)
    assert sum(len(set(seat) - set(held[w])) for seat, w in zip(seats, seated, strict=True)) == 1


def test_transfer_time_is_that_of_the_busiest_end():
    costs = uniform_costs(3, message_s=0.5)
    one = [Transfer(layer=0, source=0, target=1), Transfer(layer=1, source=0, target=2)]
    assert transfer_s(one, costs) == 1.0
    assert transfer_s([*one, Transfer(layer=2, source=1, target=0)], costs) == 1.0
    assert transfer_s([], costs) == 0.0
