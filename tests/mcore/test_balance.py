"""What the ranks tell one another of the next step's sequences, and the dealing that each works out from it."""

from __future__ import annotations

import pytest
import torch

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.mcore.loop.balance import (
    Balance,
    DealingBroken,
    Lengths,
    heads,
    linear,
    tokens_of_square,
)
from odyssey_megatron.mcore.loop.data import MicrobatchSource
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.schedule import Instr, Op
from odyssey_megatron.policy.costs.estimate import estimated_profile
from odyssey_megatron.policy.costs.sizes import AttentionShape

LAYOUT = megatron_layout(num_layers=6, pipeline_size=2, num_workers=4, num_microbatches=8)
SQUARES_ALONE = Lengths(tokens=0, of_square=1.0, longest=900.0)
"""What is not squared costs nothing."""
SQUARES = [900.0, 100.0, 900.0, 100.0, 900.0, 100.0, 100.0, 100.0]


def balances():
    return {worker: Balance(8, steps=10, lengths=SQUARES_ALONE) for worker in LAYOUT.workers}


def told(ranks, step, size=8):
    """The sum of all ranks' totals of ``step``."""
    for worker, one in ranks.items():
        one.look_ahead(step + 1, heads(LAYOUT, worker, size), lambda microbatch: SQUARES[microbatch])
    shares = [one.local_totals(heads(LAYOUT, worker, size), speaks=True) for worker, one in ranks.items()]
    return torch.stack(shares).sum(dim=0)


def orders(ranks, step):
    for one in ranks.values():
        one.begin(step)
    return {tuple(map(one.in_place, range(8))) for one in ranks.values()}


def test_all_ranks_deal_alike_also_one_that_joins():
    ranks = balances()
    assert orders(ranks, 0) == {tuple(range(8))}
    totals = told(ranks, 0)
    for one in ranks.values():
        one.take(totals, 1)
    late = ranks[9] = Balance(8, steps=10, lengths=SQUARES_ALONE)
    late.take(totals, 1)
    (order,) = orders(ranks, 1)
    assert sorted(order) == list(range(8))
    # Of 3,200 in all, as places are on the two routes by turns.
    assert {sum(SQUARES[one] for one in order[route::2]) for route in (0, 1)} == {2000, 1200}
    assert late.seen == pytest.approx((2800 / 1600, 2000 / 1600))


def test_an_evaluation_is_in_order_and_an_interrupted_step_as_it_was():
    ranks = balances()
    totals = told(ranks, 0)
    for one in ranks.values():
        one.take(totals, 1)
    (order,) = orders(ranks, 1)
    assert orders(ranks, -1) == {tuple(range(8))}
    assert orders(ranks, 1) == {order} != {tuple(range(8))}


def test_a_step_of_fewer_microbatches():
    ranks = balances()
    totals = told(ranks, 0, size=4)
    for one in ranks.values():
        one.take(totals, 1)
        one.begin(1)
        assert sorted(map(one.in_place, range(4))) == [0, 1, 2, 3]


def test_behind_the_last_step_nobody_looks():
    ranks = balances()
    totals = told(ranks, 9)
    assert not totals[5:].any()
    for one in ranks.values():
        one.take(totals, 10)
    assert orders(ranks, 10) == {tuple(range(8))}


def test_ranks_that_have_dealt_a_step_otherwise_end_the_job():
    ranks = balances()
    totals = told(ranks, 0)
    for one in list(ranks.values())[1:]:
        one.take(totals, 1)
    assert len(orders(ranks, 1)) == 2
    with pytest.raises(DealingBroken, match="have not dealt its microbatches alike"):
        ranks[0].take(told(ranks, 1), 2)


def took(order, seconds_of):
    """Of a rank that computes the first layers of the even places: those of one microbatch each way."""
    ops = (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
    return {
        Instr(op, microbatch=place, first=0, last=3): seconds_of(SQUARES[order[place]]) / 3
        for place in range(0, 8, 2)
        for op in ops
    }


def test_what_ranks_have_measured_takes_the_place_of_the_estimate():
    """By the estimate only squares cost; what is measured hardly knows them, so that microbatches are all but alike."""
    ranks = balances()
    totals = told(ranks, 0)
    for one in ranks.values():
        one.take(totals, 1)
    (order,) = orders(ranks, 1)
    ranks[0].timed(lambda: took(order, lambda squares: 0.01 + 1e-7 * squares))
    ranks[1].timed(lambda: took(order, lambda squares: 0.02 + 2e-7 * squares))
    totals = told(ranks, 1)
    assert totals[3:5].tolist() == pytest.approx([3e7, 3e-7 * 900 * 1e9])
    late = ranks[9] = Balance(8, steps=10, lengths=SQUARES_ALONE)
    for one in ranks.values():
        one.take(totals, 2)
    (order,) = orders(ranks, 2)
    mean = 0.03 + 3e-7 * sum(SQUARES) / 8
    dearest = max(sum(0.03 + 3e-7 * SQUARES[one] for one in order[route::2]) / 4 for route in (0, 1))
    assert late.seen
    assert late.seen[1] == pytest.approx(dearest / mean, rel=1e-3)
    assert late.seen[1] < 1.002


def test_a_microbatch_of_which_only_some_was_computed_here_says_nothing():
    ranks = balances()
    totals = told(ranks, 0)
    for one in ranks.values():
        one.take(totals, 1)
    (order,) = orders(ranks, 1)
    whole = took(order, lambda squares: 0.01 + 1e-6 * squares)
    ranks[0].timed(
        lambda: {one: s for one, s in whole.items() if one.op is not Op.WEIGHT_GRAD or one.microbatch}
    )
    assert not told(ranks, 1)[3:5].any(), "three microbatches are too few"


def test_costs_by_length():
    squares = [100.0 * one for one in range(1, 9)]
    found = linear(squares, [0.01 + 2e-6 * one for one in squares])
    assert found == pytest.approx((0.01, 2e-6))
    noisy = [0.01 * (1 + 0.4 * (-1) ** at) + 2e-6 * one for at, one in enumerate(squares)]
    assert linear(squares, noisy) is None, "what is known no better than that says nothing"
    assert linear([5.0] * 8, [0.01] * 8) is None, "lengths are all alike"


def test_off_costs_nothing():
    one = Balance()
    assert one.num_totals == 0
    one.look_ahead(1, range(8), lambda microbatch: pytest.fail("read"))
    assert one.local_totals({}, speaks=True).numel() == 0


def test_what_is_not_packed_has_nothing_to_deal(capfd):
    how = {"speaks": True, "places": 8, "steps": 10, "seq_length": 8, "rows": 1, "profile": profile}
    asked = OdysseyConfig(sequence_balance="auto")
    assert Balance.of(asked, is_packed=False, **how).num_totals == 0
    assert "does nothing: all sequences are of one length" in capfd.readouterr().err
    assert Balance.of(OdysseyConfig(), is_packed=True, **how).num_totals == 0
    assert Balance.of(asked, is_packed=True, **how).num_totals == 5 + 3 * 8
    assert not capfd.readouterr().err


def profile(seq_length):
    return estimated_profile(
        num_transformer_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        attention=AttentionShape.grouped(64, 4, 4, 16),
        seq_length=seq_length,
        micro_batch_size=2,
        vocab_size=1000,
    )


@pytest.mark.parametrize("seq_length", [16, 4096])
def test_a_squared_length_costs_what_scores_cost_beside_products(seq_length):
    attention, weights = 64, 4 * 64 * 64 + 3 * 64 * 256
    assert tokens_of_square(profile, seq_length) == pytest.approx(attention / weights)


def test_lengths_are_read_as_the_step_reads_them():
    samples = [{"cu_seqlens": torch.tensor([0, 2, 2 + one, 8, 8], dtype=torch.int32)} for one in range(6)]
    source = MicrobatchSource(samples, micro_batch_size=2, offset=2)
    expected = sum(2**2 + one**2 + (6 - one) ** 2 for one in (4, 5))
    assert source.squares(0, 1) == expected
    source.begin(0)
    source.go_to(1)
    next(source)
    assert source.sequences[1] == (16, expected)
