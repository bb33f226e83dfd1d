"""What follows from events, without a store, a thread or a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odyssey_megatron.cluster.events import (
    GenerationLive,
    NodeLeaves,
    NodeLost,
    OfferFailed,
    RankDied,
    RankFinished,
    RankJoined,
    RankReturned,
    Retry,
)
from odyssey_megatron.cluster.state import ClusterState, initial_state
from odyssey_megatron.errors import EXIT_FENCED, EXIT_LAYERS_LOST, EXIT_LEFT_OUT
from odyssey_megatron.launch.coordinator.reactions import (
    Answer,
    Forget,
    JobState,
    Recover,
    Report,
    Withdraw,
    offered,
    published,
    react,
)
from odyssey_megatron.launch.wire.verdict import JobVerdict
from odyssey_megatron.plan.layout import megatron_layout
from odyssey_megatron.plan.sending.generation import Finished, Generation, Stop
from tests.launch.played import PLAN

NODES = (0, 0, 1, 1, 2, 2)
ENDS = (Stop, Finished, JobVerdict)


def begun(cell_size: int = 1) -> tuple[JobState, Generation]:
    cluster = initial_state(nodes=NODES, cell_size=cell_size)
    return published(JobState(cluster=cluster, nodes=NODES, start_plan=PLAN), PLAN, "start")


def all_live(job: JobState, number: int, done: int = 0) -> JobState:
    events = [GenerationLive(ranks=(rank,), generation=number, done=done) for rank in job.cluster.ranks]
    return react(job, events, now_s=0.0)[0]


def test_nodes_that_ask_to_leave_do_not_hold_up_a_recovery():
    """They are answered afterwards; a node that is lost needs no answer, nor does a later agent of it."""
    job = all_live(begun()[0], 1)
    events = [NodeLeaves(node=0), RankDied(rank=3, code=-9, cause="killed"), NodeLeaves(node=1)]
    job, actions = react(job, events, now_s=1.0)
    assert [type(one) for one in actions] == [Report, Recover]
    assert job.asking == {0, 1}
    assert react(job, [NodeLost(node=0)], now_s=2.0)[0].asking == {1}


def test_a_death_is_reported_and_then_decided_on():
    job = all_live(begun()[0], 1)
    job, actions = react(job, [RankDied(rank=3, code=-9, cause="killed")], now_s=1.0)
    report, recover = actions
    assert (report.name, report.fields["dead"], report.fields["cause"]) == ("failure_detected", [3], "killed")
    assert recover == Recover(dead=(3,), why="failure")
    job, generation = published(job, PLAN, recover.why, dead=recover.dead)
    assert (generation.number, generation.members, generation.dead) == (2, (0, 1, 2, 4, 5), (3,))
    assert generation.previous == PLAN.layout


@pytest.mark.parametrize("comes", [True, False])
def test_the_last_loss_names_ranks_that_have_come_back_with_nothing(comes):
    """Half of a cell of two ranks waits for the other half."""
    job = all_live(begun(cell_size=2)[0], 1)
    job, _ = react(job, [RankDied(rank=4, code=-9, cause="killed")], now_s=1.0)
    if comes:
        job, _ = react(job, [RankJoined(rank=4, node=2, incarnation=1)], now_s=2.0)
    _, actions = react(job, [RankDied(rank=rank, code=-9, cause="killed") for rank in (0, 2)], now_s=3.0)
    but = " that has layers: rank(s) [4] have come back, but hold nothing yet" if comes else ""
    why = f"no rank is left{but}. Restart from the last checkpoint."
    assert actions[-1] == JobVerdict(code=EXIT_LAYERS_LOST, why=why)


@pytest.mark.parametrize("code", [EXIT_FENCED, EXIT_LEFT_OUT, 5])
def test_no_job_ends_with_a_code_of_ranks(code):
    """Where all have left alike for the others' sake, no rank is left."""
    job = all_live(begun()[0], 1)
    _, actions = react(job, [RankDied(rank=rank, code=code, cause="exit") for rank in range(6)], now_s=1.0)
    assert actions[-1].code == (code if code == 5 else EXIT_LAYERS_LOST)
    assert ("no rank is left" in actions[-1].why) == (code != 5)


@pytest.mark.parametrize(("dead", "full"), [(1, [2]), (3, []), (2, [])])
def test_a_plan_with_less_memory_is_only_for_ranks_that_are_left(dead, full):
    """Of cells of two ranks. Where no plan with less helps, ranks in ``full`` are left out, and named."""
    job = all_live(begun(cell_size=2)[0], 1)
    asked = Retry(rank=2, generation=1, reason="out of memory", out_of_memory=True)
    _, actions = react(job, [asked, RankDied(rank=dead, code=-9, cause="killed")], now_s=1.0)
    assert [rank for _, rank in actions[-1].full] == full


def test_the_first_generation_says_who_times_a_link():
    """Workers on different nodes, until a generation is live: what links take is known then."""
    layout = megatron_layout(num_layers=5, pipeline_size=3, num_workers=6, num_microbatches=2)
    plan = replace(PLAN, layout=layout)
    job = begun()[0]
    job, first = published(replace(job, start_plan=plan), plan, "nobody was live")
    assert first.timed == ((0, 2), (1, 3))
    assert published(all_live(job, first.number), plan, "failure")[1].timed == ()


@pytest.mark.parametrize("all_come", [True, False])
def test_whoever_may_come_yet_is_waited_for(all_come):
    """The others cannot connect with one that writes a checkpoint; with all there it is something else."""
    job, actions = begun()[0], []
    for round in range(200):
        number = job.cluster.generation
        if all_come or not round:
            job = all_live(job, number)
        asked = Retry(rank=1, generation=number, reason="nobody at the other end", patience_s=630.0)
        job, actions = react(job, [asked], now_s=5.5 * round)
        if isinstance(actions[-1], Stop):
            break
        job, _ = published(job, PLAN, "asked for")
        late = [GenerationLive(ranks=(1,), generation=job.cluster.generation), replace(asked, rank=2)]
        for others in ([], late):
            assert not react(job, others, now_s=5.5 * round + 1.0)[1], "nothing is to be done"
    assert round == (20 if all_come else 115)
    assert f"{round} generations in a row have come to nothing" in actions[-1].why


def test_that_a_rank_is_live_is_noted_without_a_look_at_all_others(monkeypatch):
    """There are as many such events as ranks: a job of 16,384 was deaf for 40 s at each generation's beginning."""
    job, _ = begun()
    looked = []
    monkeypatch.setattr(ClusterState, "ranks", property(looked.append))
    job, actions = react(job, [GenerationLive(ranks=(3,), generation=1)], now_s=0.0)
    assert job.cluster.live == {3}
    assert not looked
    assert not actions


@given(
    st.lists(
        st.builds(
            GenerationLive,
            ranks=st.tuples(st.integers(0, len(NODES) - 1)),
            generation=st.integers(0, 3),
            done=st.integers(0, 5),
        ),
        min_size=1,
    ),
    st.booleans(),
)
def test_reports_together_are_as_one_by_one(events, is_offered):
    job = all_live(begun()[0], 1)
    if is_offered:
        job, _ = offered(job, PLAN, "better", decide_s=0.0)
    else:
        job, _ = react(job, [RankDied(rank=3, code=-9, cause="killed")], now_s=0.0)
        job, _ = published(job, PLAN, "failure", dead=(3,))
    several, actions = job, []
    for event in events:
        several, more = react(several, [event], now_s=1.0)
        actions += more
    assert react(job, events, now_s=1.0) == (several, actions)


def test_who_waits_to_be_filled_has_not_finished_the_job():
    """All others are lost at once: what there is to decide on has no holder, and nothing was trained to the end."""
    job = all_live(begun()[0], 1)
    job, _ = react(job, [RankDied(rank=3, code=-9, cause="killed")], now_s=1.0)
    job = all_live(published(job, PLAN, "failure", dead=(3,))[0], 2)
    job, _ = react(job, [RankJoined(rank=3, node=1, incarnation=1)], now_s=2.0)
    others = (0, 1, 2, 4, 5)
    died = [RankDied(rank=rank, code=-9, cause="killed") for rank in others]
    for now in (job, offered(job, PLAN, "joined", decide_s=0.0)[0]):
        after, (report, recover) = react(now, died, now_s=3.0)
        assert (report.name, recover) == ("failure_detected", Recover(dead=others, why="failure"))
        assert after.cluster.ranks == after.cluster.fresh_ranks == (3,)


def test_a_node_and_what_its_cells_lose_with_it():
    job = all_live(begun(cell_size=2)[0], 1)
    _, (report, recover) = react(job, [NodeLost(node=1), RankDied(rank=5, code=6, cause="exit")], now_s=1.0)
    assert report.fields["code"] == [-9, -9, -9, 6]
    assert report.fields["cause"] == "cell,exit,node"
    assert report.fields["causes"] == ["node", "node", "cell", "exit"]
    assert recover.dead == (2, 3, 4, 5)


def test_nothing_is_decided_where_nobody_trains_who_has_died():
    job = all_live(begun()[0], 1)
    job, _ = react(job, [RankDied(rank=0, code=-9, cause="killed")], now_s=1.0)
    job, _ = published(job, PLAN, "failure", dead=(0,))
    job, actions = react(job, [RankJoined(rank=0, node=0, incarnation=1)], now_s=2.0)
    assert [one.newest for one in actions if isinstance(one, Answer)] == [2]
    again = RankDied(rank=0, code=-9, cause="killed", incarnation=1)
    _, actions = react(job, [again], now_s=3.0)
    assert not [one for one in actions if isinstance(one, Recover)]


def test_a_death_is_reported_before_the_return_that_is_heard_of_with_it():
    """What is journalled last of a rank tells whether it lives: views would show a living one as dead for good."""
    job = all_live(begun()[0], 1)
    old = RankDied(rank=3, code=-9, cause="killed")
    came = RankJoined(rank=3, node=1, incarnation=1)
    again = RankDied(rank=3, code=-9, cause="killed", incarnation=1)
    later = RankJoined(rank=3, node=1, incarnation=2)
    other = RankDied(rank=5, code=-9, cause="killed")
    told = {
        (old, came): "DA",
        (old, came, other): "DA",
        (old, came, again): "AD",
        (old, came, again, later): "DAA",
    }
    for events, wanted in told.items():
        _, actions = react(job, events, now_s=1.0)
        assert isinstance(actions[-1], Recover)
        assert "".join("A" if isinstance(one, Answer) else "D" for one in actions[:-1]) == wanted, events


def events_of(numbers: st.SearchStrategy[int]) -> st.SearchStrategy:
    rank = st.integers(0, len(NODES) - 1)
    return st.one_of(
        st.builds(
            RankDied,
            rank=rank,
            code=st.sampled_from([-9, 1, 0]),
            cause=st.just("killed"),
            incarnation=st.integers(0, 3),
        ),
        st.builds(NodeLost, node=st.integers(0, 2)),
        st.builds(GenerationLive, ranks=st.tuples(rank), generation=numbers, done=st.integers(0, 5)),
        st.builds(Retry, rank=rank, generation=numbers, reason=st.just("lost")),
        st.builds(RankFinished, rank=rank, generation=numbers),
        st.builds(RankJoined, rank=rank, node=st.integers(0, 2), incarnation=st.integers(1, 3)),
        st.builds(OfferFailed, rank=rank, generation=numbers, reason=st.just("no address")),
    )


@given(st.lists(st.lists(events_of(st.integers(0, 8)), max_size=6), max_size=12), st.sampled_from([1, 2]))
def test_whatever_happens(batches, cell_size):
    """Events of any kind in any order, some of generations that are not there (yet)."""
    job, generation = begun(cell_size)
    sent = [generation]
    for now_s, batch in enumerate(batches):
        again = react(job, batch, now_s=float(now_s))
        job, actions = react(job, batch, now_s=float(now_s))
        assert (job, actions) == again, "it depends on what it is given alone"
        last = [one for one in actions if isinstance(one, (Recover, *ENDS))]
        assert last == [one for one in actions[-1:] if isinstance(one, (Recover, *ENDS))]
        assert all(one.number <= sent[-1].number for one in actions if isinstance(one, Forget))
        if last and isinstance(last[0], ENDS):
            return
        if last:
            job, generation = published(job, PLAN, last[0].why, dead=last[0].dead)
            sent.append(generation)
            assert not set(generation.members) & {*generation.dead, *job.cluster.fresh_ranks}
        elif job.may_offer and job.cluster.fresh:
            job, generation = offered(job, PLAN, "joined", decide_s=0.0)
            sent.append(generation)
            assert set(generation.members) == set(job.cluster.ranks)
        assert [one.number for one in sent] == list(range(1, len(sent) + 1))
        assert set(generation.members) or set(job.cluster.ranks) == set(job.cluster.fresh_ranks)


def test_offers_that_fail_pause():
    job, number = all_live(begun()[0], 1), 1
    for now_s in (1.0, 2.0, 3.0):
        assert job.may_offer
        assert not job.tries.waits(now_s)
        job, generation = offered(job, PLAN, "better", decide_s=0.0)
        number += 1
        assert generation.number == number
        job, _ = react(job, [OfferFailed(rank=1, generation=number, reason="no address")], now_s=now_s)
    assert job.tries.waits(32.9)
    assert not job.tries.waits(33.1)
    job, generation = offered(job, PLAN, "better", decide_s=0.0)
    entered = all_live(job, generation.number)
    assert (entered.tries.failed, entered.live_plan, entered.cluster.generation) == (
        0,
        PLAN,
        generation.number,
    )
    job, _ = react(job, [OfferFailed(rank=1, generation=generation.number, reason="")], now_s=40.0)
    assert job.tries.waits(69.9), "one more try, and a pause again"


def test_an_offer_that_failed_is_not_entered():
    job = all_live(begun()[0], 1)
    job, generation = offered(job, replace(PLAN, policy="replan"), "better", decide_s=0.0)
    job, (report, withdraw) = react(job, [OfferFailed(rank=1, generation=2, reason="no address")], now_s=1.0)
    assert (report.name, report.fields) == ("offer_failed", {"generation": 2, "why": "no address"})
    assert withdraw == Withdraw(number=2, after=1)
    job = all_live(job, generation.number)
    assert (job.live_plan.policy, job.cluster.generation) == ("initial", 1)


def smaller_cells() -> JobState:
    """The second of three cells has lost rank 3 for good; rank 2 trains alone."""
    job = all_live(begun(cell_size=2)[0], 1)
    job, _ = react(job, [RankDied(rank=3, code=-9, cause="killed")], now_s=1.0)
    job = all_live(published(job, PLAN, "failure", dead=(2, 3))[0], 2)
    job, (answer,) = react(job, [RankJoined(rank=2, node=1, incarnation=1, size=1)], now_s=2.0)
    assert isinstance(answer, Answer)
    job, generation = offered(job, PLAN, "joined", decide_s=0.0)
    assert (generation.members, generation.shapes) == ((0, 1, 2, 4, 5), ((1, 1),))
    return all_live(job, 3)


def test_generations_before_the_live_one_are_forgotten_though_a_rank_waits_for_a_place():
    """It may wait for ever. If it has not heard of them yet, it goes on with the live one."""
    job = all_live(begun()[0], 1)
    job, _ = react(job, [RankDied(rank=3, code=-9, cause="killed")], now_s=1.0)
    job = all_live(published(job, PLAN, "failure", dead=(3,))[0], 2)
    job, _ = react(job, [RankJoined(rank=3, node=1, incarnation=1)], now_s=2.0)
    job, _ = offered(job, PLAN, "joined", decide_s=0.0)
    job, _ = react(job, [RankDied(rank=4, code=-9, cause="killed")], now_s=3.0)
    job, _ = published(job, PLAN, "failure", dead=(4,))

    def lives(job, number, members):
        events = [GenerationLive(ranks=(rank,), generation=number) for rank in members]
        return react(job, events, now_s=4.0)

    assert lives(job, 4, (0, 1, 2))[1] == []
    job, actions = lives(job, 4, (0, 1, 2, 5))
    assert actions == [Forget(number=4)]
    job, _ = offered(job, PLAN, "joined", decide_s=0.0)
    job, actions = lives(job, 5, (0, 1, 2, 3))
    assert actions == [], "those before the fourth are forgotten already"
    assert lives(job, 5, (5,))[1] == [Forget(number=5)]


def test_a_smaller_cell_that_leaves_is_not_lost():
    job = smaller_cells()
    job, actions = react(job, [RankReturned(rank=3)], now_s=3.0)
    assert not actions
    job, generation = offered(job, PLAN, "whole again", decide_s=0.0, leaving=job.cluster.can_be_whole)
    assert generation.members == (0, 1, 4, 5)
    gone = RankDied(rank=2, code=EXIT_FENCED, cause="exit")
    live = [GenerationLive(ranks=(rank,), generation=4) for rank in (0, 1, 4, 5)]
    for at in range(5):  # whenever its end is heard of
        after, actions = react(job, [*live[:at], gone, *live[at:]], now_s=4.0)
        assert all(isinstance(one, Forget) for one in actions), actions
        assert after.cluster.generation == 4
        assert after.cluster.dead == (1,)


def test_a_smaller_cell_that_dies_before_it_leaves_is_lost():
    job = smaller_cells()
    job, _ = react(job, [RankReturned(rank=3)], now_s=3.0)
    job, _ = offered(job, PLAN, "whole again", decide_s=0.0, leaving=job.cluster.can_be_whole)
    _, actions = react(job, [RankDied(rank=2, code=-9, cause="killed", incarnation=1)], now_s=4.0)
    assert [type(one) for one in actions][1:] == [Recover]
    _, actions = react(job, [RankDied(rank=5, code=-9, cause="killed")], now_s=4.0)
    assert [type(one) for one in actions][1:] == [Recover]


def test_an_offer_without_a_cell_may_fail_and_is_made_again():
    job = smaller_cells()
    job, _ = react(job, [RankReturned(rank=3)], now_s=3.0)
    job, _ = offered(job, PLAN, "whole again", decide_s=0.0, leaving=job.cluster.can_be_whole)
    job, _ = react(job, [OfferFailed(rank=0, generation=4, reason="slow")], now_s=4.0)
    assert (job.cluster.leaving, job.cluster.can_be_whole, job.cluster.dead) == (frozenset(), {1}, ())
