"""A slow worker leaves once that costs no more than it has cost so far. The planner is the product's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankJoined
from odyssey_megatron.cluster.state import apply, initial_state, offer_generation, with_speeds
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.launch.coordinator.replacing import Replacing
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.replacing import Price
from tests.policy.test_decide import PROFILE
from tests.policy.test_decide import job as job_of

START_S = 20.0


def planner_of(*, stages: int, memory_bytes: int | None = None, **config):
    """With the first plan of eight workers."""
    planner, state = PolicyPlanner(OdysseyConfig(device="cpu", **config)), initial_state(nodes=(0,) * 8)
    profile = replace(PROFILE, costs=replace(PROFILE.costs, memory_bytes=memory_bytes))
    plan = planner.start(job_of(stages, 16), state, to_json(profile)).plan
    planner._start_s = START_S
    return planner, plan, state


class Job:
    """Eight workers, of which number 5 is slow or not; the clock is the test's."""

    def __init__(self, folder, **how):
        self.planner, self.plan, self.state = planner_of(stages=1)
        self.folder, self.said, self.now_s = folder, [], 0.0
        known = {"acts": True, "restarts": True} | how
        self.replacing = Replacing(self.planner, Journal(folder, source="agent0"), self.said.append, **known)

    def slow(self, speed: float) -> None:
        """The plan is the best for it, too."""
        self.state = with_speeds(self.state, {5: speed})
        if speed < 1.0:
            self.plan = self.planner.rebalance(self.state, self.plan, self.now_s, 600.0).decided.plan

    def until_it_leaves(self, most_s: float):
        """The time that it takes; None if it stays for ``most_s``."""
        began_s = self.now_s
        while self.now_s < began_s + most_s:
            self.now_s += 1.0
            if (found := self.replacing.look(self.state, self.plan, self.now_s)) is not None:
                return self.now_s - began_s, found
        return None

    def replaced(self) -> None:
        """It leaves, and another process of it comes."""
        offered = offer_generation(self.state, frozenset({5}))
        gone = replace(self.state, workers=tuple(replace(w, alive=w.worker != 5) for w in offered.workers))
        self.now_s += 1.0
        assert self.replacing.look(gone, self.plan, self.now_s) is None
        number = 1 + dict(self.state.incarnations).get(5, 0)
        back = apply(gone, RankJoined(rank=5, node=0, incarnation=number))
        self.state = replace(back, fresh=frozenset())
        self.now_s += START_S
        assert self.replacing.look(self.state, self.plan, self.now_s) is None


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_it_leaves_when_its_slowness_has_cost_as_much(job):
    job.slow(0.5)
    took_s, found = job.until_it_leaves(3600.0)
    price = job.planner.without_slow(job.state, job.plan, 5, job.now_s).price
    assert price.seconds - price.lost <= took_s * price.lost <= price.seconds * 1.2 + 3 * price.lost
    assert found.worker == 5
    assert 5 not in found.plan.layout.workers
    chosen, *others = found.rows
    assert (chosen.name, chosen.chosen) == ("replace", True)
    assert chosen.transition_s == pytest.approx(price.seconds)
    assert not any(one.chosen for one in others)
    assert any(one.reason.startswith("until then: ") for one in others)
    assert "rank(s) [5] have cost" in found.why


def test_the_slower_it_is_the_sooner(job, tmp_path):
    other = Job(tmp_path / "other")
    job.slow(0.7)
    other.slow(0.2)
    assert other.until_it_leaves(7200.0)[0] < job.until_it_leaves(7200.0)[0]


def test_what_is_slow_now_and_then_adds_up(job, tmp_path):
    job.slow(0.5)
    once_s, _ = job.until_it_leaves(3600.0)
    again = Job(tmp_path / "again")
    again.slow(0.5)
    assert again.until_it_leaves(once_s / 2) is None
    again.slow(1.0)
    assert again.until_it_leaves(10_000.0) is None, "it costs nothing meanwhile"
    again.slow(0.5)
    assert again.until_it_leaves(once_s)[0] <= once_s / 2 + 3


def test_each_time_it_takes_twice_as_much(job):
    took_s = []
    for _ in range(3):
        job.slow(0.5)
        took_s.append(job.until_it_leaves(36_000.0)[0])
        job.replaced()
    assert took_s[1] / took_s[0] == pytest.approx(2.0, rel=0.3)
    assert took_s[2] / took_s[1] == pytest.approx(2.0, rel=0.3)
    assert [(one["event"], one["slow_ranks"]) for one in read_journal(job.folder)] == [("replaced", [5])] * 3


def test_a_new_process_that_is_healthy_owes_nothing(job):
    job.slow(0.5)
    assert job.until_it_leaves(3600.0)
    job.replaced()
    assert job.until_it_leaves(3600.0) is None


def test_a_little_slow_is_not_worth_it(job):
    job.state = with_speeds(job.state, {5: 0.98})
    price = job.planner.without_slow(job.state, job.plan, 5, 0.0).price
    assert price.lost < 0.03
    assert job.until_it_leaves(36_000.0) is None


def test_without_respawn_it_stays_and_that_is_said_once(tmp_path):
    job = Job(tmp_path, restarts=False)
    job.slow(0.5)
    assert job.until_it_leaves(7200.0) is None
    (said,) = job.said
    assert "rank(s) [5] have cost" in said
    assert "--odyssey-respawn" in said


def test_without_rebalancing_nobody_leaves(tmp_path):
    job = Job(tmp_path, acts=False)
    job.slow(0.5)
    assert job.until_it_leaves(7200.0) is None
    assert not job.said


def test_who_alone_has_layers_gives_them_away_and_then_leaves(tmp_path):
    job = Job(tmp_path)
    job.planner, job.plan, job.state = planner_of(stages=8)
    job.replacing.planner = job.planner
    job.state = with_speeds(job.state, {5: 0.3})
    _, first = job.until_it_leaves(3600.0)
    assert first.gives_first
    assert "once others have the layers that they alone have" in first.why
    assert first.plan.transfers
    assert 5 not in first.plan.layout.alone()
    job.plan = first.plan
    _, then = job.until_it_leaves(3600.0)
    assert (then.worker, then.gives_first) == (5, False)
    assert 5 not in then.plan.layout.workers


def test_who_has_layers_that_nobody_else_has_room_for_stays(tmp_path):
    job = Job(tmp_path)
    job.planner, job.plan, job.state = planner_of(stages=8, memory_bytes=28_000_000)
    job.replacing.planner = job.planner
    job.state = with_speeds(job.state, {5: 0.3})
    assert job.until_it_leaves(3600.0) is None
    (said,) = job.said
    assert "cannot be done without: " in said


def test_that_a_layer_has_a_single_holder_meanwhile_costs_what_it_risks(tmp_path):
    risks_s = []
    for mtbf_s in (1e4, 1e5):
        planner, plan, state = planner_of(stages=4, mtbf_s=mtbf_s, policy="reroute")
        state = with_speeds(state, {5: 0.3})
        found = planner.without_slow(state, plan, 5, 0.0)
        assert found.plan.layout.alone()
        price = found.price
        assert f"{price.risk_s:.1f} s for the risk" in price.meanwhile
        assert price.seconds == pytest.approx(replace(price, risk_s=0.0).seconds + price.risk_s)
        risks_s.append(price.risk_s)
    assert risks_s[0] / risks_s[1] == pytest.approx(10.0, rel=0.05)


def test_one_after_the_other(job):
    job.slow(0.4)
    job.state = with_speeds(job.state, {4: 0.4, 5: 0.4})
    job.plan = job.planner.rebalance(job.state, job.plan, 0.0, 600.0).decided.plan
    took = job.until_it_leaves(3600.0)
    assert took
    job.state = replace(
        job.state, workers=tuple(replace(w, alive=w.worker != took[1].worker) for w in job.state.workers)
    )
    assert job.until_it_leaves(START_S) is None, "the other one is still away"


def test_a_price_is_what_is_lost_besides(job):
    price = Price(healthy_s=1.0, kept_s=1.25, without_s=2.0, away_s=100.0, pause_s=3.0)
    assert price.lost == pytest.approx(0.2)
    assert price.seconds == pytest.approx(100.0 * 0.5 + 3.0)
    idle = replace(price, without_s=1.25)
    assert idle.seconds == pytest.approx(100.0 * 0.2 + 3.0), "who has nothing to do is not missed"
