"""Which link is slow, or whose network: simulated jobs of known causes."""

from __future__ import annotations

import numpy as np
import pytest

from odyssey_megatron.diagnosis.links import (
    LinkTiming,
    LinkVerdict,
    SumTiming,
    diagnose_links,
    diagnose_sums,
)
from tests.diagnosis.simulated import SimulatedLinks


def named(job: SimulatedLinks, last: int = 10**9) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    found = diagnose_links([one for one in job.timings() if one.step <= last], job.nodes)
    return [(one.kind, one.workers, one.nodes) for one in found.verdicts]


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_slow(seed):
    assert named(SimulatedLinks(seed=seed, steps=48)) == []


@pytest.mark.parametrize("factor", [2.0, 4.0, 20.0])
def test_one_link_within_three_steps_and_by_how_much(factor):
    job = SimulatedLinks(slow={(5, 9): factor}, first=10)
    assert named(job, 9) == []
    found = diagnose_links([one for one in job.timings() if one.step <= 12], job.nodes)
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.links, verdict.workers) == ("slow link", ((5, 9),), (5, 9))
    assert verdict.factor == pytest.approx(factor, rel=0.15)
    assert found.found[5, 9] in (11, 12)
    assert "since step 10" in verdict.evidence


def test_both_ways_of_a_link_are_one_cause():
    job = SimulatedLinks(slow={(5, 9): 3.0, (9, 5): 3.0})
    assert named(job) == [("slow link", (5, 9), ())]


def test_all_links_of_a_worker_are_its_own():
    job = SimulatedLinks()
    job = SimulatedLinks(slow=dict.fromkeys(job.of(worker=9), 3.0))
    assert named(job) == [("slow network", (9,), ())]


def test_all_links_of_a_node_are_its_network():
    job = SimulatedLinks(stages=6, replicas=4)
    job = SimulatedLinks(stages=6, replicas=4, slow=dict.fromkeys(job.of(node=1), 3.0), first=8)
    assert named(job, 7) == []
    assert named(job) == [("slow network", (8, 9, 10, 11, 12, 13, 14, 15), (1,))]


def test_between_two_nodes_neither_is_accused():
    job = SimulatedLinks()
    job = SimulatedLinks(slow=dict.fromkeys(job.of(node=1), 3.0), first=8)
    assert named(job) == [("slow network", (4, 5, 6, 7, 8, 9, 10, 11), (0, 1))]


def test_where_all_between_nodes_are_slow_no_node_is_accused():
    job = SimulatedLinks(stages=8)
    slow = {link: 3.0 for node in range(4) for link in job.of(node=node)}
    job = SimulatedLinks(stages=8, slow=slow, first=8)
    ((kind, workers, nodes),) = named(job)
    assert (kind, nodes) == ("slow network", (0, 1, 2, 3))
    assert len(workers) == 24


def test_two_causes_at_once():
    job = SimulatedLinks(stages=6)
    job = SimulatedLinks(stages=6, slow=dict.fromkeys(job.of(node=1), 3.0) | {(0, 4): 5.0}, first=8)
    assert [(kind, nodes) for kind, _, nodes in named(job)] == [("slow network", (1,)), ("slow link", ())]


def test_a_link_that_has_recovered_is_not_slow():
    job = SimulatedLinks(slow={(5, 9): 4.0}, first=6, until=14)
    assert named(job, 13) == [("slow link", (5, 9), ())]
    assert named(job, 23) == []


def test_what_all_have_in_common_is_nobodys():
    assert named(SimulatedLinks(everybody=(3.0, 10))) == []


def test_links_between_nodes_are_not_slow_for_being_slower_than_those_within():
    job = SimulatedLinks(stages=3, replicas=8, per_node=12)
    kinds = {job.nodes[a] == job.nodes[b] for a, b in job.links}
    assert kinds == {True, False}
    assert named(job) == []


def test_few_links_are_compared_with_themselves():
    alone = SimulatedLinks(stages=2, replicas=1, per_node=1, slow={(0, 1): 4.0}, first=12)
    assert named(alone, 11) == []
    assert named(alone) == [("slow link", (0, 1), ())]
    always = SimulatedLinks(stages=2, replicas=1, per_node=1, slow={(0, 1): 4.0})
    assert named(always) == [], "nobody can tell what it should take"


def test_what_delays_nobody_is_not_slow():
    job = SimulatedLinks(slow={(5, 9): 4.0})
    assert diagnose_links(job.timings(), job.nodes, least_s=2e-3).slow.keys() == {(5, 9)}
    assert not diagnose_links(job.timings(), job.nodes, least_s=4e-3).slow


def test_one_bad_step_is_nothing():
    assert named(SimulatedLinks(slow={(5, 9): 50.0}, first=10, until=11)) == []
    assert named(SimulatedLinks(slow={(5, 9): 50.0}, first=10, until=12)) == []


def test_two_steps_say_nothing():
    timings = [LinkTiming(step, a, a + 1, 9.0 if a == 3 else 1.0) for step in range(2) for a in range(5)]
    assert not diagnose_links(timings, dict.fromkeys(range(6), 0)).verdicts
    assert not diagnose_links([], {}).verdicts


def test_what_has_not_been_measured_is_as_slow_by_the_same_cause():
    nodes = {worker: worker // 4 for worker in range(16)}

    def reach(cause: str, workers: tuple[int, ...], of: tuple[int, ...] = ()) -> set[tuple[int, int]]:
        links = ((4, 8), (5, 9))
        one = LinkVerdict(kind=cause, links=links, workers=workers, nodes=of, factor=2.0, evidence="")
        return {(a, b) for a in range(16) for b in range(16) if a != b and one.concerns((a, b), nodes)}

    assert reach("slow link", (4, 5)) == {(4, 8), (5, 9)}
    assert reach("slow network", (4,)) == {link for x in range(16) if x != 4 for link in ((4, x), (x, 4))}
    assert len(reach("slow network", (4, 5, 6, 7), (1,))) == 2 * 4 * 12
    assert len(reach("slow network", (4, 5, 8, 9), (1, 2))) == 2 * 4 * 4
    assert len(reach("slow network", (4, 5, 8, 9), (0, 1, 2, 3))) == 16 * 12


def sums(slow=(), *, stages=4, replicas=4, per_node=4, steps=24, first=10, factor=3.0, seed=0):
    """Each stage's replicas sum: worker = stage * replicas + replica, on nodes of so many."""
    rng = np.random.default_rng(seed)
    nodes = {worker: worker // per_node for worker in range(stages * replicas)}
    timings = [
        SumTiming(
            step,
            workers := tuple(range(stage * replicas, (stage + 1) * replicas)),
            1e-3
            * float(np.exp(rng.normal(0.0, 0.05)))
            * (factor if step >= first and {nodes[one] for one in workers} & {*slow} else 1.0),
        )
        for step in range(steps)
        for stage in range(stages)
    ]
    return timings, nodes


@pytest.mark.parametrize("seed", range(10))
def test_sums_of_a_healthy_job(seed):
    assert not diagnose_sums(*sums(seed=seed, per_node=2)).verdicts


def test_slow_sums_and_the_one_node_that_has_a_part_in_all_of_them():
    """Stages of four workers on nodes of three: node 2 has some of stages 1 and 2."""
    (verdict,) = diagnose_sums(*sums({2}, per_node=3)).verdicts
    assert (verdict.kind, verdict.nodes, verdict.workers) == ("slow sums", (2,), (6, 7, 8))
    assert verdict.factor == pytest.approx(3.0, rel=0.1)


def test_slow_sums_by_themselves():
    """Each stage on two nodes of its own: either may be at fault."""
    (verdict,) = diagnose_sums(*sums({2}, per_node=2)).verdicts
    assert (verdict.nodes, verdict.workers) == ((), (4, 5, 6, 7))
    assert "a sum takes" in verdict.evidence


def test_one_sum_over_all_is_compared_with_itself():
    timings, nodes = sums({1}, stages=1, replicas=8)
    (verdict,) = diagnose_sums(timings, nodes).verdicts
    assert verdict.workers == tuple(range(8))
    assert not diagnose_sums(timings, dict.fromkeys(nodes, 0)).verdicts, "within a node it may be anybody's"


def test_on_a_node_that_others_use_nobody_is_accused():
    """Two links, and two sums, all of which become slower at once."""
    job = SimulatedLinks(
        stages=2, replicas=2, slow={(0, 2): 4.0, (2, 0): 4.0, (1, 3): 4.0, (3, 1): 4.0}, first=12
    )
    assert named(job) == []
    alone = SimulatedLinks(stages=2, replicas=2, slow={(0, 2): 4.0, (2, 0): 4.0}, first=12)
    assert named(alone) == [("slow link", (0, 2), ())]
    timings, nodes = sums({0}, stages=2, per_node=8)
    assert not diagnose_sums(timings, nodes).verdicts


WAYS = [(0, 3), (3, 0), (1, 4), (4, 1), (2, 5), (5, 2)]


def small_messages(seed, slow_s=0.0, first=10, last=30, steps=50) -> list[LinkTiming]:
    """What takes 0.1 to 3 ms by turns, on two cores that six ranks share; in some steps one link is slow."""
    rng = np.random.default_rng(seed)
    return [
        LinkTiming(step, *way, s + slow_s * (first <= step < last and set(way) == {0, 3}))
        for step in range(steps)
        for way, s in zip(WAYS, 1e-4 * np.exp(rng.choice([0.5, 2.5], 6) + rng.normal(0, 0.5, 6)), strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_where_messages_take_ten_times_as_long_by_turns_a_hundred_times_shows_at_once(seed):
    """And is over at once. It took 20 steps to be certain, or was not found, and was over only after as many."""
    nodes, rows = dict.fromkeys(range(6), 0), small_messages(seed, slow_s=0.03)
    seen = {last: diagnose_links([one for one in rows if one.step <= last], nodes) for last in range(5, 50)}
    said = [last for last, found in seen.items() if found.verdicts]
    assert said[0] <= 16
    assert said[-1] <= 38
    assert {*range(18, 30)} <= {*said}
    assert {one.links for last in said for one in seen[last].verdicts} <= {
        ((0, 3), (3, 0)),
        ((0, 3),),
        ((3, 0),),
    }
    assert abs(seen[25].verdicts[0].since - 10) <= 2


@pytest.mark.parametrize("seed", range(20))
def test_by_turns_nobody_is_slow(seed):
    rows = small_messages(seed, steps=300)
    for last in range(30, 300, 10):
        assert not diagnose_links(
            [one for one in rows if last - 60 < one.step <= last], dict.fromkeys(range(6), 0)
        ).verdicts
