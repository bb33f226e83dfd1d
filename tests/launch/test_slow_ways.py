"""Slow links and sums: known, done without, and taken again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.state import apply
from odyssey_megatron.diagnosis.links import Links, LinkVerdict
from odyssey_megatron.diagnosis.steps import StepTimes
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.launch.coordinator.rebalancing import Rebalancing
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.policy.case import in_cluster
from odyssey_megatron.policy.routes.links import waits_s
from tests.launch.looks import job_in, timed
from tests.policy.test_history import planner_of


@pytest.fixture
def job(tmp_path):
    return job_in(tmp_path)


def with_link(step, factor, *, longer_s=0.5, network=False, latest=None, link=(0, 2)) -> Diagnosis:
    """The link takes ``factor`` times its time, which was certain in step 4."""
    kind, workers = ("slow network", link[:1]) if network else ("slow link", link)
    verdict = LinkVerdict(kind=kind, links=(link,), workers=workers, factor=factor, evidence="by the test")
    now = {link: factor if latest is None else latest}
    links = Links(
        verdicts=(verdict,) if factor > 1.5 else (),
        factors=now,
        slow=now if factor > 1.5 else {},
        longer_s={link: longer_s},
        found={link: 4},
        latest=now,
        newest=step,
    )
    return Diagnosis(costs={}, newest=step, links=links)


def test_a_slow_link_is_found_done_without_and_taken_again(job):
    rebalancing = job(acts=True)
    assert rebalancing.look(with_link(4, 9.0), job.state, job.plan, 9.0) == (job.state, None), (
        "not before a second look"
    )
    state, better = rebalancing.look(with_link(5, 9.0), job.state, job.plan, 10.0)
    assert state.slow_links == ((0, 2, 0.5),)
    assert "link between ranks [0, 2] slow, 9.00 times the time: steps" in better.why
    mended = better.decided.plan
    assert waits_s(mended.layout, in_cluster(job.planner.known.given, state).costs) == 0
    unseen = replace(with_link(6, 9.0), links=Links(newest=6))
    assert rebalancing.look(unseen, state, mended, 15.0) == (state, None), "no message goes there any more"
    state, back = rebalancing.look(with_link(7, 1.0), state, mended, 20.0)
    assert state == job.state
    assert back.decided.plan.layout == job.plan.layout
    assert [(e["kind"], e["slow_ranks"], e["speed"]) for e in read_journal(job.folder)] == [
        ("slow link", [0, 2], pytest.approx(1 / 9)),
        ("slow link", [0, 2], 1.0),
    ]


def test_a_slow_link_is_not_over_where_times_have_become_noisier(job):
    """Nothing is certain then, but its last steps are no faster."""
    rebalancing = job(acts=True)
    known, _ = rebalancing.look(with_link(5, 9.0), job.state, job.plan, 10.0)
    uncertain = with_link(7, 9.0)
    uncertain = replace(uncertain, links=replace(uncertain.links, verdicts=(), slow={}))
    assert rebalancing.look(uncertain, known, job.plan, 20.0) == (known, None)
    nearly = replace(with_link(9, 1.6), links=replace(with_link(9, 1.6).links, verdicts=(), slow={}))
    state, _ = rebalancing.look(nearly, known, job.plan, 30.0)
    assert not state.slow_links, "it delays nobody"


def test_of_many_links_with_one_cause_the_median_says_whether_it_is_over(job):
    """There is always one whose last steps were slow by chance."""
    rebalancing, node = job(acts=True), with_link(5, 9.0).links
    links = tuple((0, other) for other in range(1, 6))
    verdict = replace(node.verdicts[0], kind="slow network", links=links, workers=(0,))

    def seen(step, factors) -> Diagnosis:
        now, slow = dict(zip(links, factors, strict=True)), min(factors) > 1.5
        known = {"factors": now, "latest": now, "longer_s": dict.fromkeys(links, 0.5), "newest": step}
        verdicts = (verdict,) if slow else ()
        of_links = Links(verdicts=verdicts, slow=now if slow else {}, found=dict.fromkeys(links, 4), **known)
        return Diagnosis(costs={}, newest=step, links=of_links)

    state, _ = rebalancing.look(seen(5, [9.0] * 5), job.state, job.plan, 10.0)
    assert state.slow_links
    state, _ = rebalancing.look(seen(7, [9.0, 9.0, 9.0, 1.0, 1.0]), state, job.plan, 20.0)
    assert state.slow_links
    state, _ = rebalancing.look(seen(9, [1.0, 1.0, 3.0, 1.1, 0.9]), state, job.plan, 30.0)
    assert not state.slow_links


@pytest.mark.parametrize(
    ("factor", "since", "again"),
    [(1.6, 1, False), (4.6, 1, False), (9.0, 1, True), (1.6, 8, True)],
    ids=["echo", "loud-echo", "much", "new"],
)
def test_a_link_that_was_slow_is_not_slow_again_by_what_has_passed(job, factor, since, again):
    """The window of steps that is looked at goes back to before it was as fast as others again, in step 7."""
    rebalancing = job(acts=True)
    state, _ = rebalancing.look(with_link(5, 9.0), job.state, job.plan, 10.0)
    state, _ = rebalancing.look(with_link(7, 1.0), state, job.plan, 20.0)
    assert not state.slow_links
    found = with_link(9, factor)
    (verdict,) = found.links.verdicts
    found = replace(found, links=replace(found.links, verdicts=(replace(verdict, since=since),)))
    state, _ = rebalancing.look(found, state, job.plan, 30.0)
    assert bool(state.slow_links) == again


def test_a_slow_link_that_a_second_look_does_not_bear_out_costs_nothing(job):
    rebalancing = job(acts=True)
    for step in (4, 5, 6):
        found = with_link(step, 9.0, latest=1.1)
        assert rebalancing.look(found, job.state, job.plan, float(step)) == (job.state, None)
    assert not list(read_journal(job.folder))


def test_a_slow_link_that_delays_nothing_is_said_and_nothing_else(job):
    planner, plan, state = planner_of(policy="reroute")
    rebalancing = Rebalancing(planner, Journal(job.folder, source="agent0"), job.said.append, acts=True)
    state, better = rebalancing.look(with_link(5, 9.0, longer_s=1e-6), state, plan, 10.0)
    assert better is None
    (said,) = job.said
    assert "the plan stays" in said
    assert rebalancing.look(with_link(6, 9.1, longer_s=1e-6), state, plan, 11.0) == (state, None)
    assert len(job.said) == 1


def test_off_only_says_so_of_links(job):
    rebalancing = job(acts=False)
    for step in (5, 6):
        assert rebalancing.look(with_link(step, 9.0), job.state, job.plan, 10.0) == (job.state, None)
    (said,) = job.said
    assert "with --odyssey-rebalance auto, " in said


def test_a_slow_link_is_one_event_whichever_direction_is_found_first(job):
    rebalancing = job(acts=True)
    there = with_link(5, 9.0)
    rebalancing.look(there, job.state, job.plan, 10.0)
    both = {(0, 2): 9.0, (2, 0): 9.0}
    verdict = replace(there.links.verdicts[0], links=tuple(both))
    found = replace(
        there.links,
        verdicts=(verdict,),
        slow=both,
        latest=both,
        longer_s=dict.fromkeys(both, 0.5),
        found=dict.fromkeys(both, 6),
        newest=7,
    )
    state, _ = rebalancing.look(replace(there, newest=7, links=found), job.state, job.plan, 20.0)
    assert {way[:2] for way in state.slow_links} == both.keys()
    (event,) = read_journal(job.folder)
    assert event["slow_ranks"] == [0, 2]


def test_a_worker_with_a_slow_network_has_no_fast_link(job):
    rebalancing = job(acts=True)
    state, _ = rebalancing.look(with_link(5, 9.0, network=True), job.state, job.plan, 10.0)
    assert {(sender, receiver) for sender, receiver, _ in state.slow_links} == {
        link for other in range(1, 8) for link in ((0, other), (other, 0))
    }


@pytest.mark.parametrize("network", [False, True])
def test_a_network_is_not_slow_for_that_of_whoever_was_there_before(job, network):
    """Another node has come in the place of worker 0, and nobody times its links, as no route goes by them."""
    rebalancing = job(acts=True)
    rebalancing.look(with_link(4, 9.0, network=network), job.state, job.plan, 9.0)
    state, better = rebalancing.look(with_link(5, 9.0, network=network), job.state, job.plan, 10.0)
    assert state.slow_links
    mended, unseen = better.decided.plan, replace(with_link(6, 9.0), links=Links(newest=6))
    others = replace(state, incarnations=((3, 1),))
    assert rebalancing.look(unseen, others, mended, 12.0) == (others, None), "others have come elsewhere"
    after, back = rebalancing.look(replace(unseen), replace(state, incarnations=((0, 1),)), mended, 15.0)
    assert (after.slow_links, back.decided.plan.layout) == ((), job.plan.layout)
    assert [e["speed"] for e in read_journal(job.folder)] == [pytest.approx(1 / 9), 1.0]


def test_a_slow_link_that_makes_no_step_longer_is_said_once_and_nothing_else(job):
    rebalancing = job(acts=True)
    for step in (5, 6):
        found = timed(with_link(step, 9.0), 1.01)
        assert rebalancing.look(found, job.state, job.plan, float(step)) == (job.state, None)
    (said,) = job.said
    assert "rank(s) [0, 2]: by the test; but steps take 1.01 times as long as before, " in said
    state, _ = rebalancing.look(timed(with_link(7, 9.0), 9.0), job.state, job.plan, 10.0)
    assert state.slow_links == ((0, 2, 0.5),)


def with_sums(step: int, factor: float, *, who=((0, 1),), node=None, longer_s=1e-6) -> Diagnosis:
    """Sums over ``who`` take ``factor`` times their time, which was certain in step 4; by ``node``, if one is given."""
    nodes, now = () if node is None else (node,), dict.fromkeys(who, factor)
    members = tuple(sorted({one for of in who for one in of}))
    verdict = LinkVerdict(
        kind="slow sums", links=who, workers=members, nodes=nodes, factor=factor, evidence="by the test"
    )
    is_slow = factor > 1.5
    sums = Links(
        verdicts=(verdict,) if is_slow else (),
        factors=now,
        slow=now if is_slow else {},
        longer_s=dict.fromkeys(who, longer_s),
        found=dict.fromkeys(who, 4),
        latest=now,
        newest=step,
    )
    return Diagnosis(costs={}, newest=step, sums=sums)


def test_slow_sums_count_in_decisions_and_are_said_once_and_when_they_are_over(job):
    rebalancing, state = job(acts=True), job.state
    assert rebalancing.look(with_sums(4, 3.0), state, job.plan, 4.0) == (state, None), "a second look"
    for step, factor in ((5, 3.0), (6, 3.1)):
        state, _ = rebalancing.look(with_sums(step, factor), state, job.plan, float(step))
        assert state.slow_sums == (((0, 1), False, 3.0),)
        assert not state.slow_links
    assert job.planner.step_s(state, job.plan) > job.planner.step_s(job.state, job.plan)
    for step in (7, 8):
        state, _ = rebalancing.look(with_sums(step, 1.0), state, job.plan, float(step))
        assert state == job.state
    assert [(e["kind"], e["slow_ranks"], e["speed"]) for e in read_journal(job.folder)] == [
        ("slow sums", [0, 1], pytest.approx(1 / 3)),
        ("slow sums", [0, 1], 1.0),
    ]


def test_sums_that_make_no_step_longer_are_said_once_and_nothing_else(job):
    rebalancing = job(acts=True)
    for step in (5, 6):
        found = with_sums(step, 400.0)
        sums = replace(found.sums, verdicts=(replace(found.sums.verdicts[0], since=3),))
        seconds = {one: 1.0 for one in range(6)}
        found = replace(found, sums=sums, took=StepTimes(generation=0, seconds=seconds))
        assert rebalancing.look(found, job.state, job.plan, float(step)) == (job.state, None)
    (said,) = job.said
    assert "rank(s) [0, 1]: by the test; but steps take 1.00 times as long as before, " in said


def test_off_only_says_so_of_sums(job):
    rebalancing = job(acts=False)
    for step in (5, 6):
        found = with_sums(step, 400.0)
        assert rebalancing.look(found, job.state, job.plan, 10.0) == (job.state, None)
    (said,) = job.said
    assert "sums of rank(s) [0, 1] slow, 400.00 times the time" in said


@pytest.mark.parametrize("longer_s", [1e-9, 1e3])
def test_who_sums_over_a_slow_network_is_put_side_by_side_unless_messages_are_slow_as_well(job, longer_s):
    """Of two nodes each has a replica of all; nobody has sent a message between them, and they may be as slow."""
    state = replace(
        job.state,
        workers=tuple(replace(one, node=one.worker % 2) for one in job.state.workers),
    )
    holders = sorted({tuple(sorted(held)) for held in job.plan.layout.holders})
    assert all(len({worker % 2 for worker in of}) == 2 for of in holders)
    found = with_sums(5, 1e4, who=tuple(holders), node=1, longer_s=longer_s)
    state, better = job(acts=True).look(found, state, job.plan, 10.0)
    assert state.slow_sums == ((tuple(range(1, 8, 2)), True, 1e4),)
    assert {(a % 2, b % 2) for a, b, _ in state.slow_links} == {(0, 1), (1, 0)}
    if longer_s > 1:
        assert better is None or not any(row.name == "relink" and row.chosen for row in better.decided.rows)
        return
    chosen = next(row for row in better.decided.rows if row.chosen)
    assert chosen.name == "relink"
    assert "side by side" in chosen.reason
    moved = better.decided.plan.layout
    assert all(len({worker % 2 for worker in of}) == 1 for of in moved.holders)
    measured = replace(with_sums(6, 1e4), links=Links(factors={(0, 1): 1.0}, newest=6), sums=Links())
    after, _ = job(acts=True).look(measured, state, better.decided.plan, 20.0)
    assert not after.slow_links, "they are measured by now, and are not"


@pytest.mark.parametrize("comes", [False, True], ids=["dead", "replaced"])
def test_a_link_of_who_has_left_is_not_slow_again_by_what_he_has_measured(job, comes):
    """Steps behind a loss are not measured at once, and the newest one that was is from before it."""
    rebalancing = job(acts=True)
    state, _ = rebalancing.look(with_link(5, 9.0), job.state, job.plan, 10.0)
    assert state.slow_links
    left = apply(state, RankDied(rank=0, code=-9, cause="killed"))
    others = replace(state, incarnations=((0, 1),)) if comes else left
    for now_s in (12.0, 13.0, 14.0):
        others, _ = rebalancing.look(with_link(5, 9.0), others, job.plan, now_s)
        assert not others.slow_links
    assert [e["speed"] for e in read_journal(job.folder)] == [pytest.approx(1 / 9), 1.0]
    if comes:
        others, _ = rebalancing.look(with_link(6, 9.0), others, job.plan, 15.0)
        assert others.slow_links, "the new one has measured it, too"
