"""What is worked out while the job trains is what a decision looks up, and changes none of them."""

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state, with_speeds
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig, policies
from odyssey_megatron.plan.scheduling import assemble, order
from odyssey_megatron.plan.scheduling.known import _KEPT_BYTES, _Kept, known
from odyssey_megatron.policy.costs.measured import Measured, UnevenSeen, alike
from odyssey_megatron.policy.costs.profile import Observation, load_profile
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.policy.preparing import incidents, losses
from odyssey_megatron.policy.shapes import partition
from odyssey_megatron.policy.shapes.search import Search
from tests.plan.samples import preset_profile, uniform_costs
from tests.policy.test_decide import PROFILE, job

OBSERVED = [
    to_json(
        Measured(
            spans=(
                Observation(
                    first=0, last=10, samples=5, forward_s=0.3, input_grad_s=0.3, weight_grad_s=0.01 * rank
                ),
            )
        )
    )
    for rank in range(8)
]


def started(**config):
    state = initial_state(nodes=(0,) * 8)
    planner = PolicyPlanner(OdysseyConfig(device="cpu", **config))
    return planner, planner.start(job(4), state, to_json(PROFILE)).plan, state


@pytest.mark.parametrize("packs_sequences", [True, False])
def test_uneven_sequences_are_found_in_jobs_that_pack_them(packs_sequences):
    state, planner = initial_state(nodes=(0,) * 8), PolicyPlanner(OdysseyConfig(device="cpu"))
    spec = replace(job(4), packs_sequences=packs_sequences)
    plan = planner.start(spec, state, to_json(PROFILE)).plan
    uneven = tuple(UnevenSeen(step=step, spread=0.2, together=0.97) for step in range(8))
    spans = [
        Observation(first=0, last=5, samples=5, forward_s=0.3, input_grad_s=0.3, weight_grad_s=0.3, step=step)
        for step in range(8)
    ]
    diagnosis = planner.learn(state, plan, [to_json(Measured(spans=tuple(spans), uneven=uneven))] * 8, 0.0)
    assert [one.kind for one in diagnosis.verdicts] == ["uneven sequences"] * packs_sequences


def died(state, *ranks):
    for rank in ranks:
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=0.0))
    return state


@pytest.mark.parametrize("policy", policies())
def test_a_death_in_any_stage_is_looked_up_with_measured_costs(policy, monkeypatch):
    planner, plan, state = started(policy=policy)
    planner.learn(state, plan, OBSERVED, 0.0)
    planner.rehearse(state, plan, 0.0)
    monkeypatch.setattr(order, "best_order", lambda *args: pytest.fail("worked out once more"))
    for rank in range(8):
        assert planner.decide(died(state, rank), plan, 1.0).plan.policy != "initial"


def test_a_death_is_looked_up_where_one_of_a_stage_is_slow_whoever_it_is(monkeypatch):
    planner, plan, state = started()
    state = with_speeds(state, {1: 0.7, 6: 0.5})
    planner.rehearse(state, plan, 0.0)
    for search in ("ranked", "ranked_with_slow"):
        monkeypatch.setattr(partition, search, lambda *args, **more: pytest.fail("worked out once more"))
    for rank in range(8):
        assert planner.decide(died(state, rank), plan, 1.0).plan.policy != "initial"


@pytest.mark.parametrize("copies", [0, 2])
def test_whichever_of_four_replicas_dies(copies, monkeypatch):
    """Their microbatches have other numbers; what is left of them looks alike."""
    state, planner = initial_state(nodes=(0,) * 16), PolicyPlanner(OdysseyConfig(device="cpu"))
    spec = replace(job(4, microbatches=24), optimizer_copies=copies)
    plan = planner.start(spec, state, to_json(PROFILE)).plan
    planner.learn(state, plan, OBSERVED, 0.0)
    planner.rehearse(state, plan, 0.0)
    monkeypatch.setattr(order, "best_order", lambda *args: pytest.fail("worked out once more"))
    for rank in range(16):
        assert planner.decide(died(state, rank), plan, 1.0).plan.policy != "initial"


@pytest.mark.parametrize("layout", ["megatron", "auto"])
@pytest.mark.parametrize("copies", [0, 2])
def test_incidents_of_a_real_model_are_looked_up(copies, layout, monkeypatch):
    """Its bytes are no round numbers, it is short of memory, and keeps messages."""
    profile = preset_profile("llama2-7b", "h100")
    profile = replace(profile, costs=replace(profile.costs, memory_bytes=48 * 2**30))
    spec = JobSpec(
        num_layers=len(profile.costs.layers),
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=1,
        num_microbatches=26,
        tokens_per_step=26 * 4096,
        train_steps=1,
        optimizer_copies=copies,
    )
    state, planner = (
        initial_state(nodes=(0,) * 4 + (1,) * 4 + (2,) * 4),
        PolicyPlanner(OdysseyConfig(device="cpu", layout=layout)),
    )
    plan = planner.start(spec, state, to_json(profile)).plan
    planner.rehearse(state, plan, 0.0)
    monkeypatch.setattr(order, "best_order", lambda *args: pytest.fail("worked out once more"))
    monkeypatch.setattr(assemble, "Kind", lambda *args: pytest.fail("lowered once more"))
    together = [ranks for ranks in incidents(plan, state) if len(ranks) > 1]
    alone = [(rank,) for rank in range(12)]
    assert [len(ranks) for ranks in together] == [2, 3, 4]
    for ranks in (*alone, *together):
        assert planner.decide(died(state, *ranks), plan, 1.0).plan.policy != "initial"


def test_what_several_nodes_lose_is_looked_up(monkeypatch):
    """Three workers on nodes of their own: no power of two."""
    state, planner = initial_state(nodes=tuple(range(12))), PolicyPlanner(OdysseyConfig(device="cpu"))
    plan = planner.start(job(4, microbatches=12), state, to_json(PROFILE)).plan
    planner.learn(state, plan, OBSERVED, 0.0)
    planner.rehearse(state, plan, 0.0)
    monkeypatch.setattr(partition, "ranked", lambda *args, **kwargs: pytest.fail("worked out once more"))
    assert planner.decide(died(state, 0, 4, 8), plan, 1.0).plan.policy != "initial"


def test_up_to_eight_nodes_and_a_quarter_of_all_workers_are_prepared_for():
    state = initial_state(nodes=tuple(rank // 8 for rank in range(256)))
    assert losses(state) == [*range(1, 9), 16, 24, 32, 40, 48, 56, 64]
    assert losses(initial_state(nodes=tuple(rank // 3 for rank in range(36))))[-1] == 9


def test_numbers_that_rarely_die_together_are_prepared_for_as_a_decision_would_look(monkeypatch):
    """Five of 24 workers on eight nodes: neither all of a node, nor of several, nor a power of two. Later losses
    that leave as many are looked at in full.
    """
    state, planner = (
        initial_state(nodes=tuple(rank // 3 for rank in range(24))),
        PolicyPlanner(OdysseyConfig(device="cpu")),
    )
    plan = planner.start(job(4, microbatches=12), state, to_json(PROFILE)).plan
    planner.learn(state, plan, OBSERVED, 0.0)
    planner.rehearse(state, plan, 0.0)
    assert 5 not in losses(state)
    monkeypatch.setattr(partition, "ranked", lambda *args, **kwargs: pytest.fail("worked out once more"))
    assert planner.decide(died(state, 0, 1, 6, 11, 16), plan, 1.0).plan.policy != "initial"


@pytest.mark.parametrize("first", [False, True])
def test_what_was_found_in_a_hurry_is_looked_at_again_once_there_is_time(first, monkeypatch):
    """With over 128 workers; what there was time for before is not."""
    looks = []
    ranked = partition.ranked
    monkeypatch.setattr(
        partition, "ranked", lambda *args, **more: looks.append(more) or ranked(*args, **more)
    )
    search = Search(uniform_costs(8, ends=True))
    for thorough in (first, True, False, True):
        search.partitions(129, 32, thorough=thorough)
    assert [more["thorough"] for more in looks] == ([True] if first else [False, True])


def test_decisions_are_what_they_are_without_it():
    learned, plan, state = started()
    learned.learn(state, plan, OBSERVED, 0.0)
    learned.rehearse(state, plan, 0.0)
    for dead in ((3,), (6, 1), (0, 5, 7)):
        looked_up = learned.decide(died(state, *dead), plan, 1.0)
        known.cache_clear()
        worked_out = learned.decide(died(state, *dead), plan, 1.0)
        assert (looked_up.plan, looked_up.rows) == (worked_out.plan, worked_out.rows)


def said(caplog):
    return [one for one in caplog.messages if "--odyssey-layout auto" in one]


@pytest.mark.parametrize("layout", ["megatron", "spread"])
def test_what_the_best_layout_would_gain_is_said_once_when_costs_are_measured(layout, caplog):
    planner, plan, state = started(layout=layout)
    planner.rehearse(state, plan, 0.0)
    assert not said(caplog), "estimates may be wrong"
    planner.learn(state, plan, OBSERVED, 0.0)
    planner.rehearse(died(state, 3), plan, 0.0)
    assert not said(caplog), "it is a question of all workers"
    for _ in range(2):
        planner.rehearse(state, plan, 0.0)
    (text,) = said(caplog)
    best, own_s = PolicyPlanner(OdysseyConfig(device="cpu", layout="auto")), planner.step_s(state, plan)
    chosen = best.start(job(4), state, to_json(planner.known.measured)).plan
    assert f"{own_s:.3g} s in this job's" in text
    assert f"{chosen.step_s:.3g} s in the best one (pipelines {chosen.layout.lengths})" in text
    assert f"{100 * (own_s / chosen.step_s - 1):.1f} % more" in text


def test_nothing_is_said_of_the_best_layout_where_it_is_chosen_or_hardly_better(caplog, monkeypatch):
    for worth, layout in ((0.01, "auto"), (1.0, "megatron")):
        monkeypatch.setattr("odyssey_megatron.policy.planner._WORTH_SAYING", worth)
        planner, plan, state = started(layout=layout)
        planner.learn(state, plan, OBSERVED, 0.0)
        planner.rehearse(state, plan, 0.0)
    assert not said(caplog)


def test_what_was_measured_is_written_down_while_the_job_trains(tmp_path):
    """However it ends, the next one can start from it."""
    planner, plan, state = started(run_dir=str(tmp_path))
    planner.keep()
    assert not [*tmp_path.iterdir()], "nothing has been measured"
    planner.learn(state, plan, OBSERVED, 0.0)
    for _ in range(2):
        planner.keep()
        kept = load_profile(tmp_path)
        assert (kept.source, kept.costs) == ("measured", planner.known.measured.costs)
        planner.rehearse(state, plan, 0.0)
    (tmp_path / "profile.json").unlink()
    planner.learn(state, plan, OBSERVED, 0.0)
    planner.keep()
    assert not [*tmp_path.iterdir()], "nothing is new"


def test_noise_changes_no_costs():
    costs = PROFILE.costs
    first, *others = costs.layers

    def with_first(**changes):
        return replace(costs, layers=(replace(first, **changes), *others))

    usual_s = others[0].compute_s
    assert alike(costs, with_first(forward_s=first.forward_s + 0.009 * usual_s))
    assert not alike(costs, with_first(forward_s=first.forward_s + 0.011 * usual_s))
    assert not alike(costs, with_first(state_bytes=first.state_bytes + 1))
    assert not alike(costs, replace(costs, link_latency_s=costs.link_latency_s + 0.011 * usual_s))


def test_what_is_kept_does_not_grow():
    kept = _Kept()
    for key in range(10):
        kept.put(key, str(key), _KEPT_BYTES // 4)
        kept.get(0)
    assert [kept.get(key) for key in range(10)] == ["0", *[None] * 6, "7", "8", "9"]


@pytest.mark.parametrize(("stages", "is_said"), [(4, True), (2, False)])
def test_copies_of_optimizer_state_that_nobody_can_keep_are_named(stages, is_said, caplog):
    planner, copies = PolicyPlanner(OdysseyConfig(device="cpu", redundancy_level=2)), 3
    asked = replace(job(stages), optimizer_copies=copies)
    planner.start(asked, initial_state(nodes=(0,) * 8), to_json(PROFILE))
    assert ("asks for 3 copies" in caplog.text and "2 holder(s)" in caplog.text) == is_said
