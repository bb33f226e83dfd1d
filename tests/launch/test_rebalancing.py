"""What the coordinator does about a diagnosis: the planner is the product's, the diagnosis the test's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from odyssey_megatron.cluster.state import initial_state, with_speeds, without
from odyssey_megatron.codec import to_json
from odyssey_megatron.diagnosis.lasting import LINK_S, remaining_s
from odyssey_megatron.diagnosis.timings import Timings
from odyssey_megatron.diagnosis.verdicts import Diagnosis, Verdict, diagnose
from odyssey_megatron.launch.coordinator.rebalancing import Rebalancing
from odyssey_megatron.launch.coordinator.slow_workers import changes
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.policy.costs.measured import Measured
from odyssey_megatron.policy.costs.profile import Observation
from tests.diagnosis.simulated import Simulated
from tests.launch.looks import job_in, timed
from tests.policy.test_history import planner_of


@pytest.fixture
def job(tmp_path):
    return job_in(tmp_path)


def slow(step=0, **factors) -> Diagnosis:
    """``w5=2.0``: worker 5 takes twice the time, which was certain in step 4; in step ``step`` as before."""
    verdicts = (
        Verdict(kind="slow worker", worker=int(name[1:]), factor=factor, found=4, evidence="by the test")
        for name, factor in factors.items()
    )
    latest = {int(name[1:]): factor for name, factor in factors.items()}
    return Diagnosis(verdicts=tuple(verdicts), costs={}, latest=latest, newest=step)


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


def test_a_slow_worker_is_not_healthy_where_times_have_become_noisier(job):
    """Nothing is certain then, but its last steps are no faster."""
    rebalancing = job(acts=True)
    known, _ = rebalancing.look(slow(5, w5=2.0), job.state, job.plan, 10.0)
    uncertain = replace(slow(7), factors={5: 1.9})
    assert rebalancing.look(uncertain, known, job.plan, 20.0) == (known, None)
    state, _ = rebalancing.look(replace(slow(9), factors={5: 1.12}), known, job.plan, 30.0)
    assert state.workers[5].speed == 1.0


def test_whoever_takes_a_slow_workers_place_is_not_slow_for_it(job):
    """Though its first steps take long, and nobody has looked since the old process left."""
    rebalancing = job(acts=True)
    known, _ = rebalancing.look(slow(5, w5=2.0), job.state, job.plan, 10.0)
    replaced = with_speeds(known, {5: 1.0})
    state, _ = rebalancing.look(replace(slow(7), factors={5: 1.9}), replaced, job.plan, 20.0)
    assert state == replaced


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
    costs = planner.known.used.costs
    heavy = [
        replace(one, forward_s=9 * one.forward_s, input_grad_s=9 * one.input_grad_s) if at == 2 else one
        for at, one in enumerate(costs.all_layers)
    ]
    planner.known.measured = planner.known.used = replace(planner.known.used, costs=costs.with_layers(heavy))
    # On hundreds of chips one always takes a little longer, which changes nothing.
    measured = [replace(slow(step, w5=1.05), factors={0: 1.0}) for step in (4, 5, 6)]
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


@pytest.mark.parametrize(("workers", "lines"), [(8, 20), (1000, 2)])
def test_how_slow_many_workers_are_does_not_fill_the_disk(job, workers, lines):
    """Noise always moves some of a thousand, whose line has as many numbers."""
    rebalancing = job(acts=False)
    for step in range(100):
        factors = {worker: 1.0 + 0.03 * ((worker + step) % 2) for worker in range(workers)}
        rebalancing.look(replace(slow(step), factors=factors), job.state, job.plan, float(step))
    assert len([event for event in read_journal(job.folder) if event["event"] == "measured"]) == lines


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


def test_what_is_nobodys_is_over_when_it_was_not_seen_for_a_while(job, capsys):
    """So that nobody who looks on is told of it for ever; it comes and goes, and that is no reason to plan anew."""
    uneven = Verdict(kind="uneven stage", layers=(3, 4), factor=1.5, evidence="by the test")
    rebalancing = job(acts=False)
    for step in range(40):
        there = (uneven,) if step < 10 or step in (12, 14) or step >= 30 else ()
        rebalancing.look(replace(slow(step), verdicts=there), job.state, job.plan, float(step))
    told = [event for event in read_journal(job.folder) if event["event"] == "slowness"]
    assert [(one["kind"], one["slow_ranks"], one["speed"]) for one in told] == [
        ("uneven stage", [], 1 / 1.5),
        ("uneven stage", [], 1.0),
        ("uneven stage", [], 1 / 1.5),
    ]
    assert len([said for said in job.said if "times the time of other stages" in said]) == 1
    assert capsys.readouterr().err.count("uneven stage") == 1


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


def test_a_node_is_not_slow_whose_workers_take_a_little_longer_or_whose_slowness_no_step_shows(job):
    """Who looks for nodes to exclude would find it on the list."""
    state = initial_state(nodes=tuple(worker.worker // 4 for worker in job.state.workers))
    rebalancing = job(acts=False)
    for step in (5, 6, 7):
        rebalancing.look(slow(step, w4=1.05, w5=1.06, w6=1.09, w7=1.05), state, job.plan, float(step))
    unseen = timed(slow(8, w4=2.0, w5=2.0, w6=2.0, w7=2.0), 1.0)
    rebalancing.look(unseen, state, job.plan, 8.0)
    assert not list(read_journal(job.folder))


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


def test_what_experts_load_gangs_with_is_known_to_decisions_and_told_where_it_is_much(job):
    rebalancing = job(acts=False)
    even, hot = {4: 1.04, 2: 2.0}, {4: 1.5, 2: 2.1}
    state, _ = rebalancing.look(replace(slow(4), expert_loads=even), job.state, job.plan, 9.0)
    assert {one.expert_loads for one in state.workers} == {((2, 2.0), (4, 1.04))}
    assert job.said == []
    known, _ = rebalancing.look(replace(slow(5), expert_loads={4: 1.06, 2: 2.02}), state, job.plan, 10.0)
    assert known is state, "as good as before"
    assert rebalancing.look(slow(6), state, job.plan, 11.0)[0] is state, "nobody has told anything new"
    state, _ = rebalancing.look(replace(slow(7), expert_loads=hot), state, job.plan, 12.0)
    assert {one.expert_loads for one in state.workers} == {((2, 2.1), (4, 1.5))}
    (said,) = job.said
    assert (
        "the busiest rank of a gang of 4 gets 1.50 times the mean of tokens, 2.10 times in one of 2" in said
    )
    told = [(event["loads"], event["experts"]) for event in read_journal(job.folder, only=("expert_loads",))]
    assert told == [([[4, 1.04], [2, 2.0]], 0), ([[4, 1.5], [2, 2.1]], 0)]
