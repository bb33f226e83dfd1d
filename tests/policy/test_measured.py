"""What ranks measure replaces what was estimated, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.codec import from_json, to_json
from odyssey_megatron.policy.costs.estimate import estimated_profile
from odyssey_megatron.policy.costs.measured import (
    EndSeen,
    LinkSeen,
    LinkTimes,
    Measured,
    alike,
    with_measured,
)
from odyssey_megatron.policy.costs.profile import Observation
from odyssey_megatron.policy.costs.sizes import AttentionShape

PROFILE = estimated_profile(
    num_transformer_layers=4, hidden_size=64, ffn_hidden_size=128, attention=AttentionShape.grouped(64, 4, 2, 16),
    seq_length=32, micro_batch_size=1, vocab_size=256,
)  # fmt: skip


def test_nothing_measured_changes_nothing():
    assert with_measured(PROFILE, []) == PROFILE
    assert with_measured(PROFILE, [Measured()]) == PROFILE


def test_link_state_and_regrouping():
    link = LinkTimes(worker=1, message_bytes=4096, empty_s=1e-4, message_s=3e-4)
    slow = LinkTimes(worker=1, message_bytes=4096, empty_s=1e-4, message_s=5e-4)
    after = with_measured(
        PROFILE,
        [
            Measured(link=link, state_bytes=((0, 10), (2, 30)), regroup_s=0.05),
            Measured(link=slow),
            Measured(link=link),
        ],
    )
    assert after.costs.message_bytes == 4096
    assert after.costs.message_s() == pytest.approx(3e-4), "the median link"
    assert after.costs.layers[0].state_bytes == 10
    assert after.costs.layers[2].state_bytes == 30
    assert after.costs.layers[1] == PROFILE.costs.layers[1]
    assert after.group_build_s == 0.05


def test_a_message_as_fast_as_nothing_has_finite_bandwidth():
    link = LinkTimes(worker=1, message_bytes=4096, empty_s=2e-4, message_s=1e-4)
    costs = with_measured(PROFILE, [Measured(link=link)]).costs
    assert 0 < costs.link_bytes_per_s < 1e12


def test_messages_without_bytes_say_nothing_of_bandwidth():
    link = LinkTimes(worker=1, message_bytes=0, empty_s=1e-4, message_s=1e-4)
    costs = with_measured(PROFILE, [Measured(link=link)]).costs
    assert (costs.message_s(), costs.link_bytes_per_s) == (1e-4, PROFILE.costs.link_bytes_per_s)


def test_the_end_of_a_step():
    """The last to come to an agreement waits for nobody. Bytes of state are stepped at the rate of most ranks."""

    def seen(step, agreement_s, optimizer_s, optimizer_bytes=1000):
        return EndSeen(
            step=step,
            agreement_s=agreement_s,
            optimizer_s=optimizer_s,
            optimizer_bytes=optimizer_bytes,
        )

    published = [
        Measured(ends=(seen(4, 0.5, 2e-3), seen(8, 0.002, 2e-3), seen(12, 0.9, 9e-3))),
        Measured(ends=(seen(4, 0.003, 1e-3), seen(8, 0.7, 2e-3))),
        Measured(ends=(seen(4, 0.8, 4e-3, 2000), seen(8, 0.1, 0.0, 0))),
    ]
    costs = with_measured(PROFILE, published).costs
    assert costs.agreement_s == pytest.approx(0.0025), "of the two steps that all have told of"
    assert costs.optimizer_s_per_byte == pytest.approx(2e-6)
    assert not alike(costs, PROFILE.costs)
    assert alike(costs, with_measured(PROFILE, [*published, Measured()]).costs)
    assert costs.of_orders == PROFILE.costs.of_orders, "orders are kept"


def test_an_estimated_optimizer_is_as_fast_as_memory():
    """Of bf16 weights with float32 gradients 46 bytes each are read and written for 12 of state."""
    costs = replace(PROFILE.costs, layers=PROFILE.costs.layers[1:2])
    weights = costs.layers[0].weight_bytes // 2
    own_s = costs.optimizer_s_per_byte * costs.spans.stepped_bytes(0, 1)
    assert own_s == pytest.approx(46 * weights / (0.8 * 2e12))


def test_round_trip():
    one = Measured(
        spans=(Observation(first=0, last=3, samples=2, forward_s=1.0, input_grad_s=1.0, weight_grad_s=0.5),),
        link=LinkTimes(worker=1, message_bytes=1, empty_s=0.1, message_s=0.2),
        state_bytes=((1, 5),),
        ends=(EndSeen(step=1, agreement_s=0.1, optimizer_s=0.2, optimizer_bytes=3),),
    )
    assert from_json(Measured, to_json(one)) == one


def test_the_links_of_the_start_count_as_they_are_now_where_that_is_far_from_it():
    """Only these: others lie within nodes where these do not, and are faster."""

    def with_links(message_s: float) -> float:
        published = []
        for worker, now_s in enumerate((message_s, message_s, message_s, 1.0)):
            at_start = LinkTimes(worker=worker, message_bytes=4096, empty_s=1e-5, message_s=1e-4)
            times_s = {worker: now_s, worker + 10: 1e-5, worker + 20: 1e-5}
            links = (
                LinkSeen(step=1, worker=one, empty_s=1e-5, message_s=time_s)
                for one, time_s in times_s.items()
            )
            published.append(Measured(link=at_start, links=tuple(links)))
        return with_measured(PROFILE, published).costs.message_s()

    assert with_links(1.2e-4) == pytest.approx(1e-4), "noise"
    assert with_links(8e-4) == pytest.approx(8e-4), "all are slower; a slow one among them changes nothing"


def test_what_the_dead_have_seen_of_a_recovery_does_not_count_for_ever():
    """One in which somebody was stuck takes a minute; those behind it do not, and plans are weighed by them."""

    def measured(regroup_s, *steps):
        spans = (
            Observation(
                first=0, last=3, samples=2, forward_s=1.0, input_grad_s=1.0, weight_grad_s=0.5, step=step
            )
            for step in steps
        )
        return Measured(spans=tuple(spans), regroup_s=regroup_s)

    living, dead = measured(0.5, 85, 90, 95, 100), measured(60.0, 50, 55, 60, 65)
    assert with_measured(PROFILE, [dead, living, measured(0.6, 90, 95)]).group_build_s == 0.6
    assert with_measured(PROFILE, [dead]).group_build_s == 60.0
