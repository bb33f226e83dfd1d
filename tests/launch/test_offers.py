"""Where a job goes between two steps, with the real planner and no processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import GenerationLive, RankDied, Retry
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import initial_state
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.launch.coordinator.offers import Offers
from odyssey_megatron.launch.coordinator.reactions import JobState, Recover, published, react
from odyssey_megatron.launch.coordinator.rebalancing import Rebalancing
from odyssey_megatron.launch.coordinator.replacing import Replacing
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.plan.samples import uniform_costs

WORKERS = 8


class Job:
    """Two stages of four replicas each; ranks do what they are told to at once."""

    def __init__(self, folder):
        spec = JobSpec(
            num_layers=10,
            pipeline_model_parallel_size=2,
            tensor_model_parallel_size=1,
            num_microbatches=8,
            tokens_per_step=1000,
            train_steps=100,
        )
        costs = replace(uniform_costs(10, state_bytes=10_000), link_bytes_per_s=500.0)
        self.planner = PolicyPlanner(OdysseyConfig(run_dir=str(folder)))
        nodes, journal, said = (0,) * WORKERS, Journal(folder, source="agent0"), []
        self.offers = Offers(
            self.planner,
            Rebalancing(self.planner, journal, said.append, acts=False),
            Replacing(self.planner, journal, said.append, acts=False, restarts=False),
        )
        cluster = initial_state(nodes=nodes)
        plan = self.planner.start(spec, cluster, to_json(Profile(costs=costs))).plan
        self.state = JobState(cluster=cluster, nodes=nodes, start_plan=plan)
        self.state, _ = published(self.state, plan, "start")
        self.live()

    def live(self):
        cluster = self.state.cluster
        said = [
            GenerationLive(ranks=(rank,), generation=cluster.generation) for rank in sorted(cluster.members)
        ]
        self.state, _ = react(self.state, said, now_s=1.0)

    def hears(self, *events):
        """And recovers, as the coordinator does."""
        self.state, actions = react(self.state, events, now_s=1.0)
        assert isinstance(actions[-1], Recover)
        live = self.state.live_plan
        decided = self.planner.decide(self.state.cluster, live, 1.0)
        self.offers.recovered(decided, live)
        self.state, _ = published(self.state, decided.plan, actions[-1].why)
        self.live()

    def asks(self):
        self.hears(Retry(rank=0, generation=self.state.cluster.generation, reason="a message was lost"))

    def dies(self, rank):
        self.hears(RankDied(rank=rank, code=-9, cause="killed"))

    def proposal(self):
        self.state, found = self.offers.following(self.state, None, 1.0)
        return found


@pytest.mark.parametrize("times", [1, 2])
def test_a_job_that_was_on_its_way_goes_on_to_somewhere_better(tmp_path, times):
    """A rank asks for fresh groups before the layers have moved: what is decided then is to stay, for now."""
    job = Job(tmp_path)
    job.dies(5)
    at_once = job.state.live_plan
    assert (at_once.policy, at_once.transfers) == ("reroute", ())
    aim = job.proposal()
    assert aim.plan.policy == "fill"
    for _ in range(times):
        job.asks()
    assert job.state.live_plan.layout.routes == at_once.layout.routes
    again = job.proposal()
    assert again.plan.layout == aim.plan.layout
    assert any(row.chosen for row in again.rows)


def test_a_job_that_was_where_it_wants_to_be_stays(tmp_path):
    job = Job(tmp_path)
    job.asks()
    assert job.proposal() is None


def test_a_better_plan_is_looked_for_behind_a_decision_in_haste(tmp_path):
    """The worker that dies was not in the layout's way: by what was decided the job would stay as it is."""
    job = Job(tmp_path)
    job.dies(5)
    live = job.state.live_plan
    decided = replace(job.planner.decide(job.state.cluster, live, 1.0), target=None)
    for is_hasty in (False, True):
        job.offers.recovered(replace(decided, is_hasty=is_hasty), None)
        found = job.proposal()
        assert (found is not None) == is_hasty
    assert any(row.chosen for row in found.rows)
