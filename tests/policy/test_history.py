"""What ranks measure, step by step: who is slow, and what layers cost on those who are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.state import initial_state, with_speeds
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.diagnosis.cells import with_ranks
from odyssey_megatron.diagnosis.verdicts import Diagnosis, Verdict
from odyssey_megatron.policy.costs.history import History
from odyssey_megatron.policy.costs.measured import HeldSeen, LinkSeen, Measured, StepSeen, SumSeen, UnevenSeen
from odyssey_megatron.policy.costs.profile import Observation
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.policy.test_decide import PROFILE, job

FOREVER = 3600.0
NOBODY = Diagnosis(costs={})
"""Was slow before."""
RANK_3 = replace(
    NOBODY, verdicts=(Verdict(kind="slow worker", worker=3, factor=2.0, evidence="by the test"),)
)

LEARNED = PROFILE.costs.with_layers(
    replace(one, forward_s=0.1, input_grad_s=0.1, weight_grad_s=0.1) for one in PROFILE.costs.all_layers
)


def seen(step, first, last, factor=1.0):
    time_s = 0.1 * (last - first) * factor
    return Observation(
        first=first,
        last=last,
        samples=3,
        forward_s=time_s,
        input_grad_s=time_s,
        weight_grad_s=time_s,
        step=step,
    )


def published(*steps, slow=(), factor=2.0):
    """Two pipelines of two stages, rank by rank."""
    spans = ((0, 5), (5, 10)) * 2
    return {
        rank: Measured(
            spans=tuple(seen(step, *spans[rank], factor if rank in slow else 1.0) for step in steps),
        )
        for rank in range(4)
    }


def history(*steps, **how):
    return History(1).with_published(published(*steps, **how), {})


def test_a_slow_worker_and_what_its_layers_cost_elsewhere():
    both = history(*range(0, 4)).with_published(published(*range(4, 8), slow=(3,)), {})
    found = both.diagnosis(NOBODY, PROFILE.costs)
    assert found.slow == {3: pytest.approx(0.5)}
    assert [one.forward_s for one in both.healthy(found)] == pytest.approx([0.5, 0.5])


def test_steps_that_were_published_twice_count_once():
    once = history(0, 1, 2, 3)
    twice = once.with_published(published(2, 3, 4), {})
    assert len(twice.timings()) == 4 * 3 * 5
    assert once.with_published(published(0, 1, 2, 3), {}) == once


def test_old_steps_are_forgotten():
    long = history(*range(200))
    assert long.timings().steps == tuple(range(152, 200))


def test_what_the_process_before_has_measured_is_forgotten():
    before = history(*range(6), slow=(3,))
    assert before.with_published({}, {3: 1}).timings().workers == (0, 1, 2)
    again = before.with_published({3: Measured(spans=(seen(6, 5, 10),), incarnation=1)}, {3: 1})
    assert again.diagnosis(NOBODY, PROFILE.costs).slow == {}


def test_a_cell_is_as_slow_as_its_slowest_rank():
    cells = History(2).with_published(
        {
            rank: Measured(spans=tuple(seen(s, 0, 10, 1.5 if rank == 5 else 1.0) for s in range(5)))
            for rank in range(8)
        },
        {},
    )
    assert cells.diagnosis(NOBODY, PROFILE.costs).slow == {2: pytest.approx(1 / 1.5)}


def test_a_single_microbatch_counts_once():
    """Rank 1 has fifteen of its own layers, and one of other layers, which takes half as long again: 1.03 in all."""
    few = (0, 1, 2, 3, 4, 5)
    more = {
        rank: replace(one, spans=tuple(replace(span, samples=15) for span in one.spans))
        for rank, one in published(*few).items()
    }
    odd = tuple(replace(seen(step, 0, 5, 1.5), samples=1) for step in few)
    more[1] = replace(more[1], spans=(*more[1].spans, *odd))
    found = History(1).with_published(more, {}).diagnosis(NOBODY, PROFILE.costs)
    assert found.slow == {}
    assert found.factors[1] == pytest.approx(15.5 / 15, rel=0.01)


def in_cells(computes, probes, ranks=8):
    """Cells of so many ``ranks`` in total, eight steps; rank -> so many times its time."""
    return {
        rank: Measured(
            spans=tuple(
                one
                for step in range(8)
                for one in (
                    seen(step, 0, 10, computes.get(rank, 1.0)),
                    Observation(
                        first=0, last=0, samples=1, forward_s=1e-4 * probes.get(rank, 1.0),
                        input_grad_s=0.0, weight_grad_s=0.0, step=step,
                    ),
                )
            )
        )
        for rank in range(ranks)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("computes", "probes", "blamed", "by"),
    [
        ({5: 2.0}, {5: 2.0}, (5,), "what each computes itself"),
        ({4: 2.0, 5: 2.0}, {4: 2.0}, (4,), "a product that is the same on all"),
        ({4: 2.0, 5: 2.0}, {}, (), ""),
    ],
    ids=["on a CPU", "on a GPU, where sums are part of the time", "both"],
)  # fmt: skip
def test_the_rank_that_holds_up_its_cell_is_named(computes, probes, blamed, by):
    found = History(2).with_published(in_cells(computes, probes), {}).diagnosis(NOBODY, PROFILE.costs)
    (verdict,) = found.verdicts
    assert (verdict.worker, verdict.ranks) == (2, blamed)
    assert verdict.factor == pytest.approx(2.0)
    assert by in verdict.evidence
    assert ("the others of its cell wait for" in verdict.evidence) == bool(blamed)


HOT = {0: 3.0, 4: 3.0, 8: 3.0}
"""In each of three gangs the first rank has an expert that most tokens go to."""


@pytest.mark.parametrize("spreads_experts", [False, True])
def test_a_rank_whose_experts_get_many_tokens_is_not_taken_for_the_slow_one(spreads_experts):
    found = History(4, spreads_experts=spreads_experts).with_published(
        in_cells(HOT | {6: 4.0}, {}, ranks=12), {}
    )
    (verdict,) = found.diagnosis(NOBODY, PROFILE.costs).verdicts
    assert (verdict.worker, verdict.ranks) == (1, (6,))
    assert "rank(s) 6 (4.00 times as long)" in verdict.evidence


def test_where_no_other_gang_has_its_layers_only_the_product_tells():
    def verdict_with(probes):
        told = in_cells(HOT | {6: 4.0}, probes, ranks=12)
        for rank in range(4, 8):
            spans = told[rank].spans
            told[rank] = replace(
                told[rank], spans=tuple(replace(one, last=one.last * 9 // 10) for one in spans)
            )
        before = replace(
            NOBODY, verdicts=(Verdict(kind="slow worker", worker=1, factor=2.0, evidence="by the test"),)
        )
        rows = History(4, spreads_experts=True).with_published(told, {}).own_work()
        (found,) = with_ranks(before, rows, 4, spreads_experts=True).verdicts
        return found.ranks

    assert verdict_with({}) == ()
    assert verdict_with({6: 4.0}) == (6,)


def test_who_has_nothing_to_do_is_seen_by_the_product_that_all_compute():
    def steps(factor, *numbers):
        return {
            rank: Measured(
                spans=tuple(
                    one
                    for step in numbers
                    for one in (
                        *([] if rank == 3 else [seen(step, 0, 10)]),
                        Observation(
                            first=0, last=0, samples=1, forward_s=1e-4 * (factor if rank == 3 else 1.0),
                            input_grad_s=0.0, weight_grad_s=0.0, step=step,
                        ),
                    )
                )
            )
            for rank in range(4)
        }  # fmt: skip

    idle = History(1).with_published(steps(3.0, *range(8)), {})
    assert idle.diagnosis(RANK_3, PROFILE.costs).slow == {3: pytest.approx(1 / 3)}
    recovered = idle.with_published(steps(1.0, *range(8, 14)), {})
    assert recovered.diagnosis(RANK_3, PROFILE.costs).slow == {}


def test_layers_that_only_a_slow_worker_computes_cost_what_they_did_before():
    """Its pipeline was cut anew: nobody else computes the same span."""
    spans = {0: (0, 5), 1: (5, 10), 2: (0, 8), 3: (8, 10)}
    alone = History(1).with_published(
        {
            rank: Measured(spans=tuple(seen(step, *span, 2.0 if rank == 3 else 1.0) for step in range(8)))
            for rank, span in spans.items()
        },
        {},
    )
    assert alone.diagnosis(RANK_3, LEARNED).slow == {3: pytest.approx(0.5)}


def looked_at(spans, factor, *, steps):
    """Who is called slow after each of ``steps``, one diagnosis after the other; ``factor``: of a rank in a step."""
    known, found, said = History(1), NOBODY, []
    for step in range(steps):
        times = {rank: (seen(step, *span, factor(rank, step)),) for rank, span in enumerate(spans)}
        known = known.with_published({rank: Measured(spans=one) for rank, one in times.items()}, {})
        found = known.diagnosis(found, LEARNED)
        said.append({rank: round(speed, 3) for rank, speed in found.slow.items()})
    return said


@pytest.mark.parametrize("spans", [[(0, 5), (5, 10)] * 3, [(0, 10)] * 3], ids=["a stage's", "all"])
def test_two_of_three_stay_slow_for_as_long_as_they_are(spans):
    """When most of the window is from after it, the one who is healthy is not taken for a fast one."""
    each = len(spans) // 3
    slow_since = {0: 10, each: 14}
    said = looked_at(spans, lambda rank, step: 2.0 if step >= slow_since.get(rank, 99) else 1.0, steps=90)
    assert all(one == {0: 0.5, each: 0.5} for one in said[18:])


@pytest.mark.parametrize(
    ("spread", "together", "packs_sequences", "kinds"),
    [
        (0.2, 0.97, True, ["uneven sequences"]),
        (0.2, 0.3, True, []),
        (0.02, 0.97, True, []),
        (0.2, 0.97, False, []),
    ],
    ids=["sequences", "noise", "alike", "a busy machine"],
)
def test_sequences_of_unequal_length_are_said(spread, together, packs_sequences, kinds):
    """Ranks publish medians over their microbatches, and beside them how unlike these were. A job whose sequences are
    all equally long has no uneven ones, even where something else holds up forwards and backwards together.
    """
    told = {
        rank: replace(
            one, uneven=tuple(UnevenSeen(step=at, spread=spread, together=together) for at in range(8))
        )
        for rank, one in published(*range(8)).items()
    }
    known = History(1, packs_sequences=packs_sequences).with_published(told, {})
    assert [one.kind for one in known.diagnosis(NOBODY, LEARNED).verdicts] == kinds


def test_what_only_a_slow_worker_computes_costs_what_it_did():
    """The same layers cost as much as before, which layers of its kind do not on average."""
    spans, costs = [(0, 5), (5, 10)], (1.0, 1.09)
    said = looked_at(spans, lambda rank, step: costs[rank] * (1.3 if rank and step >= 10 else 1.0), steps=60)
    assert all(one == {1: pytest.approx(1 / 1.3, rel=0.01)} for one in said[13:])


def planner_of(ranks=8, memory_bytes=None, **config):
    planner, state = PolicyPlanner(OdysseyConfig(device="cpu", **config)), initial_state(nodes=(0,) * ranks)
    profile = replace(PROFILE, costs=replace(PROFILE.costs, memory_bytes=memory_bytes))
    return planner, planner.start(job(4), state, to_json(profile)).plan, state


@pytest.mark.parametrize("speed", [0.7, 0.3])
def test_a_slow_worker_gets_less_and_then_what_it_had(speed):
    planner, plan, state = planner_of()
    slow = with_speeds(state, {5: speed})
    found = planner.rebalance(slow, plan, 0.0, FOREVER)
    mended = found.decided.plan
    assert found.gain > 0.03
    assert mended.layout != plan.layout
    back = planner.rebalance(with_speeds(slow, {5: 1.0}), mended, 0.0, FOREVER).decided.plan
    assert (back.layout, back.programs) == (plan.layout, plan.programs), "exactly the first plan"


def test_what_will_be_over_at_once_changes_nothing():
    planner, plan, state = planner_of()
    found = planner.rebalance(with_speeds(state, {5: 0.7}), plan, 0.0, 1e-3)
    assert (found.decided.plan.layout, found.gain) == (plan.layout, 0.0)


def exchanged(*steps, slow=(), factor=4.0):
    """Three pipelines of two stages: each rank with the one below or above, a message in 10 ms."""
    found = {}
    for rank in range(6):
        peer = (rank + 3) % 6
        message_s = 0.01 * (factor if (rank, peer) in slow else 1.0)
        seen_of = (
            LinkSeen(step=step, worker=peer, empty_s=1e-4, message_s=message_s * (1 + 0.01 * (step % 3)))
            for step in steps
        )
        spans = tuple(seen(step, *((0, 5), (5, 10))[rank // 3]) for step in steps)
        found[rank] = Measured(spans=spans, links=tuple(seen_of))
    return found


NODES = {worker: worker // 3 for worker in range(6)}


def test_a_slow_link_and_how_much_longer_it_takes():
    both = History(1).with_published(exchanged(*range(6)), {})
    both = both.with_published(exchanged(*range(6, 10), slow={(1, 4)}), {})
    links = both.diagnosis(NOBODY, PROFILE.costs, NODES).links
    (verdict,) = links.verdicts
    assert (verdict.links, verdict.workers) == (((1, 4),), (1, 4))
    assert links.longer_s == {(1, 4): pytest.approx(0.03, rel=0.05)}
    assert both.diagnosis(NOBODY, PROFILE.costs).links.verdicts == (), "nobody says where the workers are"


def test_a_link_that_costs_a_hundredth_of_a_stage_is_not_slow():
    small = {
        rank: replace(one, links=tuple(replace(link, message_s=link.message_s / 30) for link in one.links))
        for rank, one in exchanged(*range(10), slow={(1, 4)}).items()
    }
    assert not History(1).with_published(small, {}).diagnosis(NOBODY, PROFILE.costs, NODES).links.verdicts


def test_what_another_process_has_seen_of_links_is_forgotten():
    once = History(1).with_published(exchanged(*range(10), slow={(1, 4)}), {})
    again = replace(exchanged(10)[1], incarnation=1)
    assert once.diagnosis(NOBODY, PROFILE.costs, NODES).links.verdicts
    links = once.with_published({1: again}, {1: 1}).diagnosis(NOBODY, PROFILE.costs, NODES).links
    assert not links.verdicts


def test_between_cells_the_slowest_of_their_links_counts():
    of_two = History(2).with_published(
        {
            rank: Measured(links=(LinkSeen(step=0, worker=1 - rank // 2, empty_s=0.0, message_s=1.0 + rank),))
            for rank in range(4)
        },
        {},
    )
    assert [(one.sender, one.receiver, one.seconds) for one in of_two.link_timings()] == [
        (0, 1, 2.0),
        (1, 0, 4.0),
    ]


def test_slow_sums():
    """Two stages of three workers on three nodes: a sum of each takes three times as long from step 6 on."""

    def published(step: int) -> dict[int, Measured]:
        seconds = 0.03 if step >= 6 else 0.01
        return {
            first: Measured(
                spans=(seen(step, 0, 5),),
                sums=(
                    SumSeen(step=step, workers=f"{first}-{first + 2}", seconds=seconds * (1 + step % 2 / 99)),
                ),
            )
            for first in (0, 3)
        }

    found = History(1)
    for step in range(12):
        found = found.with_published(published(step), {})
    sums = found.diagnosis(NOBODY, PROFILE.costs, {worker: worker % 3 for worker in range(6)}).sums
    assert [one.workers for one in sums.verdicts] == [(0, 1, 2), (3, 4, 5)]
    assert sums.longer_s[0, 1, 2] == pytest.approx(0.02, rel=0.05)


def test_how_long_steps_of_the_newest_generation_took():
    """Of each step the median of its ranks; one that is behind says nothing of what came after."""

    def published(generation: int, *times_s: float) -> dict[int, Measured]:
        steps = [StepSeen(step=10 * generation + at, generation=generation, seconds=0.0) for at in range(2)]
        return {
            rank: Measured(
                spans=tuple(seen(one.step, 0, 5) for one in steps),
                steps=tuple(replace(one, seconds=time_s) for one in steps),
            )
            for rank, time_s in enumerate(times_s)
        }

    before = History(1).with_published(published(1, 1.0, 2.0, 9.0), {})
    took = before.diagnosis(NOBODY, PROFILE.costs).took
    assert (took.generation, took.seconds) == (1, {10: 2.0, 11: 2.0})
    after = before.with_published(published(2, 3.0, 5.0), {}).diagnosis(NOBODY, PROFILE.costs).took
    assert (after.generation, after.seconds) == (2, {20: 4.0, 21: 4.0})
    assert History(1).diagnosis(NOBODY, PROFILE.costs).took.generation == -1


@pytest.mark.parametrize(("cell_size", "found"), [(1, {3}), (2, set())])
def test_ranks_of_a_cell_that_wait_for_each_other_have_not_lost_their_processors(cell_size, found):
    """Rank 3 takes three times its own time on the wall, from step 8 on."""
    steps = range(16)
    known = {
        rank: replace(
            one,
            held=tuple(
                HeldSeen(step=step, computed_s=0.1, wall_s=0.3 if rank == 3 and step >= 8 else 0.1)
                for step in steps
            ),
        )
        for rank, one in published(*steps).items()
    }
    diagnosis = History(cell_size).with_published(known, {}).diagnosis(NOBODY, PROFILE.costs)
    assert diagnosis.held_up == found
    assert diagnosis.slow.keys() == found
