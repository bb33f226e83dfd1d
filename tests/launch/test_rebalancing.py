"""What the coordinator does about a diagnosis: the planner is the product's, the diagnosis the test's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from odyssey_megatron.cluster.state import initial_state, with_speeds, without
from odyssey_megatron.codec import to_json
from odyssey_megatron.diagnosis.lasting import LINK_S, remaining_s
from odyssey_megatron.diagnosis.links import Links, LinkVerdict
from odyssey_megatron.diagnosis.steps import StepTimes
from odyssey_megatron.diagnosis.timings import Timings
from odyssey_megatron.diagnosis.verdicts import Diagnosis, Verdict, diagnose
from odyssey_megatron.launch.rebalancing import Rebalancing, changes
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.policy.case import with_links
from odyssey_megatron.policy.links import waits_s
from odyssey_megatron.policy.measured import Measured
from odyssey_megatron.policy.profile import Observation
from tests.diagnosis.simulated import Simulated
from tests.policy.test_history import planner_of


def slow(step=0, **factors) -> Diagnosis:
    """``w5=2.0``: worker 5 takes twice the time, which was certain in step 4; in step ``step`` as before."""
    verdicts = (
        Verdict(kind="slow worker", worker=int(name[1:]), factor=factor, found=4, evidence="by the test")
        for name, factor in factors.items()
    )
    latest = {int(name[1:]): factor for name, factor in factors.items()}
    return Diagnosis(verdicts=tuple(verdicts), costs={}, latest=latest, newest=step)


@pytest.fixture
def job(tmp_path):
    planner, plan, state = planner_of()
    said: list[str] = []

    def made(*, acts: bool) -> Rebalancing:
        return Rebalancing(planner, Journal(tmp_path, source="agent0"), said.append, acts=acts)

    made.plan, made.state, made.said, made.folder, made.planner = plan, state, said, tmp_path, planner
    return made


def test_found_mended_and_back(job):
    rebalancing = job(acts=True)
    assert rebalancing.look(slow(4, w5=2.0), job.state, job.plan, 9.0) == (job.state, None), (
        "not before a second look"
    )
    state, better = rebalancing.look(slow(5, w5=2.0), job.state, job.plan, 10.0)
    assert state.workers[5].speed == 0.5
    assert "rank(s) [5] slow, 2.00 times the time: steps" in better.why
    mended = better.decided.plan
    state, back = rebalancing.look(slow(6), state, mended, 20.0)
    assert state == job.state
    assert back.decided.plan.layout == job.plan.layout
    assert [(e["slow_ranks"], e["speed"]) for e in read_journal(job.folder)] == [([5], 0.5), ([5], 1.0)]


def test_who_has_left_is_not_slow_any_more_and_who_was_blamed_is_cleared(job):
    rebalancing, blamed = job(acts=True), slow(5, w5=2.0)
    blamed = replace(blamed, verdicts=tuple(replace(one, ranks=(7,)) for one in blamed.verdicts))
    rebalancing.look(slow(4, w5=2.0), job.state, job.plan, 9.0)
    state, better = rebalancing.look(blamed, job.state, job.plan, 10.0)
    gone = without(state, {5})
    rebalancing.look(slow(6), gone, better.decided.plan, 20.0)
    rebalancing.look(slow(7), gone, better.decided.plan, 21.0)
    assert [(e["slow_ranks"], e["speed"]) for e in read_journal(job.folder)] == [([7], 0.5), ([7], 1.0)]


@pytest.mark.parametrize("layout", ["auto", "megatron"])
def test_a_job_that_chose_its_layout_by_an_estimate_looks_once_more(job, layout):
    """By what its layers turn out to cost, without being asked for anything else."""
    planner, plan, state = planner_of(layout=layout, memory_bytes=60 * 10**6)
    rebalancing = Rebalancing(
        planner, Journal(job.folder, source="agent0"), job.said.append, acts=False, seeks=layout == "auto"
    )
    costs = planner._learned.costs
    heavy = [
        replace(one, forward_s=9 * one.forward_s, input_grad_s=9 * one.input_grad_s) if at == 2 else one
        for at, one in enumerate(costs.all_layers)
    ]
    planner._measured = planner._learned = replace(planner._learned, costs=costs.with_layers(heavy))
    measured = [Diagnosis(costs={}, newest=step, factors={0: 1.0}) for step in (4, 5, 6)]
    assert rebalancing.look(slow(4, w5=2.0), state, plan, 8.0) == (state, None), (
        "not while somebody may be slow"
    )
    after, better = rebalancing.look(measured[0], state, plan, 9.0)
    assert after == state
    if layout == "megatron":
        assert (better, job.said) == (None, [])
        return
    assert better.why.startswith("layers' costs are measured: steps ")
    moved = better.decided.plan
    assert planner.step_s(state, moved) < 0.97 * planner.step_s(state, plan)
    assert rebalancing.look(measured[1], state, moved, 10.0) == (state, None)
    gone = replace(state, workers=(replace(state.workers[0], alive=False), *state.workers[1:]))
    assert rebalancing.look(measured[2], gone, moved, 11.0) == (gone, None)
    rebalancing.look(Diagnosis(costs={}, newest=7, factors={0: 1.0}), state, moved, 12.0)
    (said,) = job.said
    assert said.startswith("[odyssey] layers' costs are measured: the plan stays")


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
    assert waits_s(mended.layout, with_links(job.planner._profile, state).costs) == 0
    unseen = replace(with_link(6, 9.0), links=Links(newest=6))
    assert rebalancing.look(unseen, state, mended, 15.0) == (state, None), "no message goes there any more"
    state, back = rebalancing.look(with_link(7, 1.0), state, mended, 20.0)
    assert state == job.state
    assert back.decided.plan.layout == job.plan.layout
    assert [(e["kind"], e["slow_ranks"], e["speed"]) for e in read_journal(job.folder)] == [
        ("slow link", [0, 2], pytest.approx(1 / 9)),
        ("slow link", [0, 2], 1.0),
    ]


@pytest.mark.parametrize(
    ("factor", "since", "again"),
    [(1.6, 1, False), (9.0, 1, True), (1.6, 8, True)],
    ids=["echo", "much", "new"],
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


def timed(diagnosis: Diagnosis, longer: float, since=3, generation=0) -> Diagnosis:
    """Steps take ``longer`` times as long from ``since`` on."""
    seconds = {step: longer if step >= since else 1.0 for step in range(6)}
    found = {
        "verdicts": tuple(replace(one, since=since) for one in diagnosis.verdicts),
        "took": StepTimes(generation=generation, seconds=seconds),
    }
    if diagnosis.links.verdicts:
        links = tuple(replace(one, since=since) for one in diagnosis.links.verdicts)
        found["links"] = replace(diagnosis.links, verdicts=links)
    return replace(diagnosis, **found)


def test_a_slow_worker_that_makes_no_step_longer_is_said_once_and_nothing_else(job):
    rebalancing = job(acts=True)
    for step in (5, 6, 7):
        found = timed(slow(step, w5=2.0), 1.02)
        assert rebalancing.look(found, job.state, job.plan, float(step)) == (job.state, None)
    (said,) = job.said
    assert "rank(s) [5]: by the test; but steps take 1.02 times as long as before, " in said
    assert not list(read_journal(job.folder))
    longer = timed(slow(8, w5=2.0), 1.8)
    state, better = rebalancing.look(longer, job.state, job.plan, 9.0)
    assert state.workers[5].speed == 0.5
    assert better is not None
    (event,) = read_journal(job.folder)
    assert event["why"].startswith("by the test; steps take 1.80 times as long as before, ")


def test_steps_of_another_generation_say_nothing(job):
    found = timed(slow(5, w5=2.0), 1.0, generation=1)
    assert job(acts=True).look(found, job.state, job.plan, 9.0)[0].workers[5].speed == 0.5


def test_a_worker_that_is_known_is_not_doubted_again(job):
    """Once the plan gives it less to do, steps are short again."""
    rebalancing = job(acts=True)
    state, better = rebalancing.look(timed(slow(5, w5=2.0), 1.8), job.state, job.plan, 9.0)
    found = timed(slow(6, w5=3.0), 1.0)
    assert rebalancing.look(found, state, better.decided.plan, 10.0)[0].workers[5].speed == pytest.approx(
        1 / 3
    )


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


def test_what_a_second_look_does_not_bear_out_costs_nothing(job):
    rebalancing = job(acts=True)
    for step, newest in ((4, 2.0), (5, 1.0), (6, 1.05)):
        found = replace(slow(step, w5=2.0), latest={5: newest})
        assert rebalancing.look(found, job.state, job.plan, float(step)) == (job.state, None)
    assert rebalancing.look(slow(6, w5=2.0), job.state, job.plan, 7.0)[1] is not None


def test_off_only_says_so(job):
    rebalancing = job(acts=False)
    for step, factor in ((4, 2.0), (5, 2.0), (6, 2.1)):
        assert rebalancing.look(slow(step, w5=factor), job.state, job.plan, 10.0) == (job.state, None)
    (said,) = job.said
    assert "with --odyssey-rebalance auto" in said
    assert rebalancing.look(slow(7), job.state, job.plan, 20.0) == (job.state, None)
    assert [(e["slow_ranks"], e["speed"]) for e in read_journal(job.folder)] == [([5], 0.5), ([5], 1.0)]


def test_each_diagnosis_is_looked_at_once(job):
    rebalancing, diagnosis = job(acts=True), slow(5, w5=2.0)
    rebalancing.look(slow(4, w5=2.0), job.state, job.plan, 9.0)
    assert rebalancing.look(diagnosis, job.state, job.plan, 10.0)[1] is not None
    assert rebalancing.look(diagnosis, job.state, job.plan, 11.0) == (job.state, None)
    assert rebalancing.look(None, job.state, job.plan, 11.0) == (job.state, None)


def measured_with_a_heavy_last_stage(plan) -> list[str]:
    """What each rank publishes: the last of four stages takes three times what the layers of the others do."""
    found = []
    for rank in range(8):
        (hop,) = {hop for route in plan.layout.routes for hop in route.hops if hop.worker == rank}
        took_s = 0.01 * (hop.last - hop.first) * (3.0 if hop.last == plan.layout.num_layers else 1.0)
        times_s = {"forward_s": took_s, "input_grad_s": took_s, "weight_grad_s": took_s}
        spans = (
            Observation(first=hop.first, last=hop.last, samples=4, step=step, **times_s) for step in range(6)
        )
        found.append(to_json(Measured(spans=tuple(spans))))
    return found


@pytest.mark.parametrize("acts", [False, True])
def test_layers_move_off_a_heavy_stage_once(job, acts):
    published = measured_with_a_heavy_last_stage(job.plan)
    diagnosis = job.planner.learn(job.state, job.plan, published, 0.0)
    (verdict,) = diagnosis.verdicts
    assert verdict.kind == "uneven stage"
    rebalancing = job(acts=acts)
    state, better = rebalancing.look(diagnosis, job.state, job.plan, 0.0)
    assert state == job.state
    if acts:
        (kept,) = (row.step_s for row in better.decided.rows if row.name == "keep")
        assert better.decided.plan.step_s < 0.6 * kept
        assert "times the time of other stages: steps" in better.why
    else:
        (said,) = job.said
        assert "with --odyssey-rebalance auto, " in said
        assert "would make steps" in said
    for _ in range(3):
        assert rebalancing.look(replace(diagnosis), job.state, job.plan, 0.0) == (job.state, None), (
            "said once"
        )
    assert [event["kind"] for event in read_journal(job.folder) if event["event"] == "slowness"] == [
        "uneven stage"
    ]


def test_all_workers_of_a_node_are_a_slow_node(job, tmp_path):
    nodes = tuple(worker.worker // 4 for worker in job.state.workers)
    state = initial_state(nodes=nodes)
    rebalancing = job(acts=False)
    rebalancing.look(slow(4, w4=2.0, w5=2.0, w6=2.0), state, job.plan, 0.0)
    assert not list(read_journal(job.folder)), "one of its workers is as fast as others"
    rebalancing.look(slow(5, w4=2.0, w5=2.0, w6=2.0, w7=1.8), state, job.plan, 0.0)
    rebalancing.look(slow(6, w4=2.0, w5=2.0, w6=2.0), state, job.plan, 0.0)
    found = [event for event in read_journal(job.folder) if event["kind"] == "slow node"]
    assert [(event["slow_ranks"], event["speed"]) for event in found] == [
        ([4, 5, 6, 7], pytest.approx(1 / 1.8)),
        ([4, 5, 6, 7], 1.0),
    ]


@pytest.mark.parametrize(
    ("level", "most"),
    [
        (lambda step: 1.0, 0),
        (lambda step: 1.07, 0),
        (lambda step: 1.1, 1),
        (lambda step: 1.11, 2),
        (lambda step: 1.35 + 0.05 * math.sin(step / 5), 2),
        (lambda step: 1.5 if 60 <= step < 120 else 1.0, 2),
        (lambda step: 3.0 if step % 20 == 0 else 1.0, 0),
    ],
    ids=["healthy", "just below", "at the threshold", "just above", "wanders", "there and back", "bad steps"],
)  # fmt: skip
def test_nothing_flaps(level, most):
    """A hundred and eighty measured steps with the jitter of real jobs: how often worker 3 gets another speed."""
    state, count = initial_state(nodes=(0,) * 16), 0
    whole = Simulated(replicas=3, stages=2, steps=180, microbatches=2).timings()
    is_3 = whole.worker == 3
    factors = np.array([level(step) for step in range(180)])
    seconds = np.where(is_3, whole.seconds * factors[whole.step], whole.seconds)
    for newest in range(20, 180, 5):
        rows = (whole.step <= newest) & (whole.step > newest - 48)
        names = ("worker", "piece", "tokens", "squares", "microbatch")
        columns = {name: getattr(whole, name)[rows] for name in names}
        first = max(0, newest - 47)
        window = Timings(
            steps=tuple(range(first, newest + 1)),
            workers=whole.workers,
            pieces=whole.pieces,
            step=whole.step[rows] - first,
            seconds=seconds[rows],
            **columns,
        )
        changed = changes(state, diagnose(window).slow)
        assert changed.keys() <= {3}
        state, count = with_speeds(state, changed), count + len(changed)
    assert count <= most


def test_little_is_nothing(job):
    state = job.state
    assert changes(state, {5: 1 / 1.05}) == {}
    assert changes(state, {5: 1 / 1.2}) == {5: 1 / 1.2}
    state_5 = with_speeds(state, {5: 0.5})
    assert changes(state_5, {5: 1 / 2.2}) == {}
    assert changes(state_5, {5: 1 / 1.05}) == {}, "not certainly over"
    assert changes(state_5, {5: 1 / 3.0}) == {5: 1 / 3.0}
    assert changes(state_5, {}) == {5: 1.0}


def test_a_smaller_cell_is_slow_beside_its_share(job):
    """Half a cell that takes twice the time of whole ones is healthy."""
    one = replace(job.state.workers[5], share=0.5)
    state = replace(job.state, workers=(*job.state.workers[:5], one, *job.state.workers[6:]))
    assert changes(state, {5: 0.5}) == changes(state, {}) == changes(state, {5: 0.53}) == {}
    assert changes(state, {5: 0.25}) == {5: 0.5}
    assert changes(state, {5: 0.8}) == {5: 1.6}
    assert with_speeds(state, {5: 1.6}).workers[5].pace == pytest.approx(0.8)
    assert changes(with_speeds(state, {5: 1.6}), {}) == {5: 1.0}


def test_how_long_it_will_last():
    assert remaining_s(0.0) == 600.0
    assert remaining_s(0.0, mean_s=LINK_S) == 1440.0
    assert remaining_s(1000.0) > remaining_s(0.0), "the longer it has lasted"
    assert remaining_s(0.0, [1.0] * 10) < 60.0, "where it is always over soon"
