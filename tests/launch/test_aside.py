"""A cell with a slow rank goes on without it where fresh processes do not help, and is whole again when it may pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankJoined, RankReturned
from odyssey_megatron.cluster.state import apply, initial_state, with_speeds
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.diagnosis.verdicts import SLOW_WORKER, Diagnosis, Verdict
from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.launch.coordinator.aside import Aside
from odyssey_megatron.launch.coordinator.offers import Offers
from odyssey_megatron.launch.coordinator.reactions import JobState
from odyssey_megatron.launch.coordinator.rebalancing import Rebalancing
from odyssey_megatron.launch.coordinator.replacing import Replacing
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.policy.test_decide import PROFILE
from tests.policy.test_decide import job as job_of

START_S, CELL, SLOW_RANK = 20.0, 5, 10
NAMED = {CELL: (SLOW_RANK,)}


class Job:
    """Eight cells of two ranks, of which number 5 is slow by its first rank; the clock is the test's. Routes turn
    nowhere: with those the others do without it as well as with what is left of it.
    """

    def __init__(self, folder, **config):
        self.planner = PolicyPlanner(OdysseyConfig(device="cpu", **config))
        self.spec = replace(job_of(1, 16), tensor_model_parallel_size=2, revisits=False)
        self.state = initial_state(nodes=(0,) * 16, cell_size=2)
        self.plan = self.planner.start(self.spec, self.state, to_json(PROFILE)).plan
        self.planner._start_s = START_S
        self.folder, self.said, self.now_s = folder, [], 0.0
        self.replacing = Replacing(
            self.planner, Journal(folder, source="agent0"), self.said.append, acts=True, restarts=True
        )
        self.aside = Aside(self.planner)

    def offers(self) -> Offers:
        rebalancing = Rebalancing(self.planner, self.replacing.journal, self.said.append, acts=True)
        return Offers(self.planner, rebalancing, self.replacing)

    def slow(self, speed: float) -> None:
        self.state = with_speeds(self.state, {CELL: speed})
        self.plan = self.planner.rebalance(self.state, self.plan, self.now_s, 600.0).decided.plan

    def until_it_leaves(self, most_s: float = 36_000.0, named=NAMED):
        began_s = self.now_s
        while self.now_s < began_s + most_s:
            self.now_s += 1.0
            if (found := self.replacing.look(self.state, self.plan, self.now_s, named)) is not None:
                return found
        raise AssertionError(f"it stays for {most_s} s")

    def comes_back(self, size: int = 0) -> None:
        """It leaves, and fresh processes of it come, as a cell that is whole or smaller."""
        workers = tuple(replace(w.whole, alive=w.worker != CELL) for w in self.state.workers)
        gone = replace(self.state, workers=workers, returned=frozenset())
        self.now_s += 1.0
        assert self.replacing.look(gone, self.plan, self.now_s) is None
        number = 1 + max([0, *dict(self.state.incarnations).values()])
        for rank in (SLOW_RANK, SLOW_RANK + 1)[: size or 2]:
            gone = apply(gone, RankJoined(rank=rank, node=0, incarnation=number, size=size))
        self.now_s += START_S
        self.aside.may_be_whole(gone, self.plan, self.now_s)
        self.state = replace(gone, fresh=frozenset())
        self.plan = self.planner.rebalance(self.state, self.plan, self.now_s, 600.0).decided.plan
        assert self.replacing.look(self.state, self.plan, self.now_s) is None

    def until_it_may_be_whole(self, most_s: float = 36_000.0) -> tuple[float, str]:
        self.state = apply(self.state, RankReturned(rank=SLOW_RANK + 1))
        began_s = self.now_s
        while self.now_s < began_s + most_s:
            self.now_s += 1.0
            found, why = self.aside.may_be_whole(self.state, self.plan, self.now_s)
            if found:
                assert found == {CELL}
                return self.now_s - began_s, why
        raise AssertionError(f"it stays smaller for {most_s} s")


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_replaced_first_and_then_done_without(job):
    job.slow(0.2)
    assert job.until_it_leaves().without == ()
    job.comes_back()
    job.slow(0.2)
    began_s = job.now_s
    found = job.until_it_leaves()
    assert (found.worker, found.without) == (CELL, (SLOW_RANK,))
    assert CELL not in found.plan.layout.workers, "what is left of it comes back as fresh processes"
    chosen, *others = found.rows
    assert (chosen.name, chosen.chosen) == ("smaller", True)
    assert not any(one.chosen for one in others)
    assert "as their fresh processes are, too" in found.why
    price = job.planner.without_slow(job.state, job.plan, CELL, job.now_s).price
    smaller = job.planner.smaller(job.state, job.plan, CELL, (SLOW_RANK,), job.now_s)
    assert price.healthy_s < smaller.step_s < price.kept_s
    cost_s = (job.now_s - began_s) * price.lost
    assert smaller.saved_s(price, cost_s) == pytest.approx(price.seconds, rel=0.15)
    job.comes_back(size=1)
    told = [(one["event"], one["slow_ranks"]) for one in read_journal(job.folder)]
    assert told == [("replaced", [10, 11]), ("set_aside", [10])]


@pytest.mark.parametrize(
    ("speed", "named"), [(0.2, {}), (0.2, {CELL: (10, 11)}), (0.6, NAMED)], ids=["unknown", "all", "half"]
)
def test_it_is_replaced_again_where_fewer_ranks_are_no_better(job, speed, named):
    """Nobody knows whose fault it is; or all of them are slow; or half a cell is slower still."""
    for _ in range(2):
        job.slow(speed)
        assert job.until_it_leaves(named=named).without == ()
        job.comes_back()


def test_the_table_of_another_decision_has_it(job):
    job.slow(0.2)
    rows = {one.name: one for one in job.replacing.row(job.state, job.plan, 1.0, NAMED)}
    assert rows.keys() == {"replace", "smaller"}
    assert rows["replace"].step_s < rows["smaller"].step_s
    assert "faster with the cell of rank(s) [10] going on without them" in rows["smaller"].reason
    assert "< " in rows["smaller"].reason
    assert len(job.replacing.row(job.state, job.plan, 1.0)) == 1, "nobody knows by which rank it is slow"


def test_why_it_cannot_be_smaller_is_in_the_table(tmp_path):
    job = Job(tmp_path, shrink="off")
    job.slow(0.2)
    (_, row) = job.replacing.row(job.state, job.plan, 1.0, NAMED)
    assert (row.step_s, row.reason) == (None, "the cell of rank(s) [10] without them: --odyssey-shrink off")


@pytest.mark.parametrize(
    ("cell", "spec", "reason"),
    [
        ({"other_nodes": (1,)}, {}, "several nodes"),
        ({"ranks": (10,), "missing": (11,)}, {}, "already"),
        ({}, {"whole_cells_only": "fp8"}, "fp8"),
        ({}, {"whole_shards_only": "Muon"}, "Muon"),
    ],
)
def test_which_cells_stay_whole(job, cell, spec, reason):
    workers = tuple(replace(w, **cell) if w.worker == CELL else w for w in job.state.workers)
    job.planner._job = replace(job.spec, **spec)
    with pytest.raises(PlanInfeasible, match=reason):
        job.planner.smaller(replace(job.state, workers=workers), job.plan, CELL, (SLOW_RANK,), 1.0)


def test_it_is_whole_again_once_that_has_cost_as_much_and_each_time_twice(job):
    took_s = []
    for _ in range(3):
        job.aside.note(CELL, (SLOW_RANK,), job.now_s)
        job.comes_back(size=1)
        found, why = job.aside.may_be_whole(job.state, job.plan, job.now_s)
        assert not found
        seconds, why = job.until_it_may_be_whole()
        took_s.append(seconds)
        assert "to be without rank(s) [10], which were slow, has cost" in why
        job.comes_back()
        assert job.aside.may_be_whole(job.state, job.plan, job.now_s) == (frozenset(), "")
    price = job.planner.without_slow(job.state, job.plan, CELL, job.now_s).price
    assert took_s[0] > price.away_s * price.lost
    assert took_s[1] / took_s[0] == pytest.approx(2.0, rel=0.3)
    assert took_s[2] / took_s[1] == pytest.approx(2.0, rel=0.3)


def test_what_is_smaller_for_another_reason_is_whole_at_once(job):
    job.comes_back(size=1)
    job.state = apply(job.state, RankReturned(rank=SLOW_RANK + 1))
    assert job.aside.may_be_whole(job.state, job.plan, job.now_s) == (frozenset({CELL}), "")


def test_an_offer_says_who_comes_back_without_whom(job):
    """As the coordinator asks for one."""
    offers = job.offers()
    job.slow(0.2)
    job.until_it_leaves()
    job.comes_back()
    job.slow(0.2)
    known = replace(job.state, generation=1)
    played = JobState(cluster=known, nodes=(0,) * 16, start_plan=job.plan, live_plan=job.plan)
    verdict = Verdict(
        kind=SLOW_WORKER, worker=CELL, ranks=(SLOW_RANK,), factor=5.0, since=1, found=3, evidence=""
    )
    diagnosis = Diagnosis(verdicts=(verdict,), costs={}, latest={CELL: 5.0}, newest=9)
    for second in range(10_000):
        played, proposal = offers.following(played, diagnosis, job.now_s + second)
        if proposal is not None and proposal.leaving:
            break
    assert (proposal.leaving, dict(proposal.without)) == ({CELL}, NAMED)


@pytest.mark.parametrize("slow", [False, True], ids=["was-smaller", "was-slow"])
def test_who_alone_has_layers_gives_them_away_before_it_leaves(tmp_path, slow):
    """Two cells, one for each half of the layers: the second one can be whole again, or is slow and to be replaced."""
    job = Job(tmp_path)
    spec = replace(job.spec, pipeline_model_parallel_size=2)
    state = initial_state(nodes=(0,) * 4, cell_size=2)
    plan = job.planner.start(spec, state, to_json(PROFILE)).plan
    assert len(plan.layout.holders[-1]) == 1
    cell = state.workers[1]
    cell = replace(cell, speed=0.2) if slow else cell.smaller(1)
    state = replace(state, workers=(state.workers[0], cell), returned=frozenset(cell.missing), generation=1)
    offers = job.offers()
    played, second = JobState(cluster=state, nodes=(0,) * 4, start_plan=plan, live_plan=plan), 0.0
    seen = []
    while not seen or not seen[-1].leaving:
        for _ in range(10_000):
            second += 1.0
            played, proposal = offers.following(played, None, second)
            if proposal is not None:
                break
        seen.append(proposal)
        played = replace(played, live_plan=proposal.plan)
    first, last = seen[0], seen[-1]
    assert "once others have the layers that they alone have" in first.why
    assert "once others" not in last.why
    assert last.leaving == {1}
    assert set(seen[-2].plan.layout.holders[-1]) >= {0}, "the other one has all layers"
    assert last.plan.layout.workers == (0,)
    assert last.plan.transfers == ()


def test_it_waits_for_somebody_who_has_room_for_what_it_alone_has(tmp_path, caplog):
    """Two cells a stage, of which one is lost of each, and the others are smaller; that of the second stage can be
    whole.
    """
    job = Job(tmp_path)
    spec = replace(job.spec, pipeline_model_parallel_size=2)
    state = initial_state(nodes=(0,) * 8, cell_size=2)
    costs = replace(PROFILE.costs, memory_bytes=116_000_000)
    """Of a rank, which has half of all layers, with what there were two for."""
    plan = job.planner.start(spec, state, to_json(replace(PROFILE, costs=costs))).plan
    assert plan.layout.holders[-1] == (2, 3)
    cell = state.workers[2].smaller(1)
    workers = (replace(state.workers[0], alive=False), state.workers[1].smaller(1), cell)
    workers += (replace(state.workers[3], alive=False),)
    state = replace(state, workers=workers, generation=1)
    plan = job.planner.decide(state, plan, 1.0).plan
    assert plan.layout.holders[-1] == (2,)
    offers = job.offers()
    state = replace(state, returned=frozenset(cell.missing))
    played = JobState(cluster=state, nodes=(0,) * 8, start_plan=plan, live_plan=plan)
    for second in range(100):
        played, proposal = offers.following(played, None, float(second))
        assert proposal is None
    (told,) = caplog.messages
    assert told == (
        "no plan, though the cell(s) of rank(s) [[4]] can be whole again, and leave for that: they alone have layers 5 "
        "to 8 and the head, and nobody else has room for that. They stay smaller until there is one"
    ), "nobody is dead, and the job goes on"
    for rank in state.workers[3].ranks:
        state = apply(state, RankJoined(rank=rank, node=0, incarnation=1))
    assert state.fresh == {3}
    _, proposal = offers.following(replace(played, cluster=state), None, 100.0)
    assert "once others have the layers that they alone have" in proposal.why
    assert 3 in proposal.plan.layout.workers
    assert 2 not in proposal.plan.layout.alone()
