from __future__ import annotations

import random

import pytest

from odyssey_megatron.cluster.events import (
    GenerationLive,
    NodeLost,
    RankDied,
    RankFinished,
    Retry,
    event_from_jsonable,
    event_to_jsonable,
)
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import Cell, apply, initial_state, next_generation
from odyssey_megatron.errors import ConfigError


def died(rank: int, t_s: float = 1.0) -> RankDied:
    return RankDied(rank=rank, code=-9, cause="killed", t_s=t_s)


@pytest.fixture
def state():
    """Four ranks on two nodes, in generation 1."""
    return next_generation(initial_state(nodes=(0, 0, 1, 1)))


def test_a_death_takes_the_worker_out_and_is_remembered(state):
    after = apply(state, died(2, t_s=7.0))
    assert (after.alive, after.dead, after.ranks) == ((0, 1, 3), (2,), (0, 1, 3))
    assert after.failure_times_s == (7.0,)
    assert state.alive == (0, 1, 2, 3), "apply is pure"


def test_the_same_death_twice_says_nothing_new(state):
    after = apply(state, died(2))
    assert apply(after, died(2, t_s=9.0)) is after


def test_a_lost_node_takes_all_its_ranks(state):
    after = apply(apply(state, died(3, t_s=1.0)), NodeLost(node=1, t_s=2.0))
    assert after.alive == (0, 1)
    assert after.failure_times_s == (1.0, 2.0), "rank 3 was dead already"


def test_a_cell_is_lost_with_any_of_its_ranks():
    state = initial_state(nodes=(0, 0, 0, 0, 1, 1, 1, 1), tensor_model_parallel_size=2)
    after = apply(state, died(5))
    assert (after.alive, after.dead, after.ranks) == ((0, 1, 3), (2,), (0, 1, 2, 3, 6, 7))
    assert apply(after, died(4)) is after, "its other rank went with it"


def test_ranks_of_a_cell_talk_to_their_likes():
    cell = Cell(rank=5, size=2)
    assert (cell.worker, cell.index, cell.ranks) == (2, 1, (4, 5))
    assert cell.peer(0) == 1
    assert cell.named("block:0:4") != Cell(rank=4, size=2).named("block:0:4"), (
        "two groups, with an address each"
    )
    assert Cell(rank=5).peer(3) == 3


def test_a_rank_that_finished_does_not_die(state):
    after = apply(apply(state, RankFinished(rank=1)), died(1))
    assert after.alive == (0, 1, 2, 3)


def test_a_retry_changes_no_membership(state):
    assert apply(state, Retry(rank=0, generation=1, reason="connection reset")) is state


def test_live_once_every_member_said_so(state):
    for rank in (0, 2, 3):
        state = apply(state, GenerationLive(rank=rank, generation=1))
        assert not state.is_live
    assert apply(state, GenerationLive(rank=1, generation=1)).is_live


def test_reports_of_another_generation_do_not_count(state):
    for rank in range(4):
        state = apply(state, GenerationLive(rank=rank, generation=0))
        state = apply(state, GenerationLive(rank=rank, generation=2))
    assert state.live == frozenset()


def test_a_new_generation_is_not_live_until_reported_again(state):
    for rank in range(4):
        state = apply(state, GenerationLive(rank=rank, generation=1))
    assert not next_generation(state).is_live
    assert next_generation(state).alive == state.alive


def test_a_member_that_dies_before_it_reported_does_not_hold_up_the_others(state):
    """The survivors' reports are complete, but a step may only have been committed with all: no false 'live'."""
    for rank in (0, 1, 2):
        state = apply(state, GenerationLive(rank=rank, generation=1))
    before, after = state, apply(state, died(3))
    assert not before.is_live
    assert not after.is_live, "so the previous layout counts: rank 3 cannot have entered an agreement"
    assert not next_generation(after).is_live


def test_worker_of(state):
    assert state.worker_of(2).node == 1
    with pytest.raises(KeyError):
        state.worker_of(9)


def random_event(rng: random.Random, ranks: int, nodes: int):
    rank = rng.randrange(ranks)
    return rng.choice(
        [
            died(rank, t_s=rng.random()),
            NodeLost(node=rng.randrange(nodes), t_s=rng.random()),
            GenerationLive(rank=rank, generation=rng.randrange(4)),
            Retry(rank=rank, generation=1, reason="x"),
            RankFinished(rank=rank),
        ]
    )


@pytest.mark.parametrize("seed", range(50))
def test_whatever_happens(seed):
    """Nobody comes back, ids stay, each death is counted once, and every event applied again changes nothing."""
    rng = random.Random(seed)
    ranks, nodes = rng.randrange(1, 12), rng.randrange(1, 4)
    state = initial_state(nodes=tuple(rng.randrange(nodes) for _ in range(ranks)))
    for _ in range(40):
        if rng.random() < 0.2:
            state = next_generation(state)
        event = random_event(rng, ranks, nodes)
        after = apply(state, event)
        assert apply(after, event) == after
        assert set(after.dead) >= set(state.dead)
        assert sorted(after.alive + after.dead) == list(range(ranks))
        assert len(after.failure_times_s) == len(after.dead)
        assert after.is_live == (after.members <= after.live)
        assert after.is_live <= state.is_live or isinstance(event, GenerationLive), "no death makes it live"
        assert after.generation == state.generation
        state = after


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_deaths_does_not_matter_for_who_is_left(seed):
    rng = random.Random(seed)
    events = [died(rank) for rank in rng.sample(range(8), 4)] + [NodeLost(node=1, t_s=0.0)]
    start = initial_state(nodes=(0, 0, 0, 1, 1, 2, 2, 2))
    left = set()
    for _ in range(3):
        rng.shuffle(events)
        state = start
        for event in events:
            state = apply(state, event)
        left.add(state.alive)
    assert len(left) == 1


def test_events_round_trip_and_strangers_are_refused():
    events = (died(1), NodeLost(node=0, t_s=1.0), GenerationLive(rank=1, generation=2), RankFinished(rank=0),
              Retry(rank=1, generation=1, reason="x"))  # fmt: skip
    for event in events:
        assert event_from_jsonable(event_to_jsonable(event)) == event
    for wrong in ({}, {"kind": "Coup"}, {"kind": "RankDied"}, [], {"kind": "RankFinished", "rank": "0"}):
        with pytest.raises(ValueError):
            event_from_jsonable(wrong)


def job(**changes) -> JobSpec:
    values = {
        "num_layers": 10,
        "pipeline_model_parallel_size": 4,
        "tensor_model_parallel_size": 1,
        "num_microbatches": 16,
        "tokens_per_step": 1024,
        "train_steps": 40,
    }
    return JobSpec(**(values | changes))


def test_a_job_that_fits():
    job().check(8)


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        (
            {"tensor_model_parallel_size": 4},
            8,
            "--pipeline-model-parallel-size 4 times --tensor-model-parallel-size 4",
        ),
        ({}, 6, "world size (6 ranks) is not divisible by --pipeline-model-parallel-size 4"),
        ({"pipeline_model_parallel_size": 0}, 8, "Start a multiple of 1 ranks"),
        ({"num_layers": 5}, 8, "--pipeline-model-parallel-size 4 exceeds --num-layers 3"),
        ({"num_microbatches": 1}, 8, "1 microbatch(es) per global batch cannot feed 2 pipelines"),
    ],
)
def test_a_job_that_does_not(changes, world_size, message):
    with pytest.raises(ConfigError) as caught:
        job(**changes).check(world_size)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
