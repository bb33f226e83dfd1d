from __future__ import annotations

import random

import pytest

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.cluster.events import (
    GenerationLive,
    NodeLost,
    OfferFailed,
    RankDied,
    RankFinished,
    RankJoined,
    Retry,
    event_from_jsonable,
    event_to_jsonable,
)
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import (
    apply,
    initial_state,
    lost_between,
    next_generation,
    offer_generation,
)
from odyssey_megatron.errors import ConfigError


def died(rank: int, t_s: float = 1.0, incarnation: int = 0) -> RankDied:
    return RankDied(rank=rank, code=-9, cause="killed", incarnation=incarnation, t_s=t_s)


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
    state = initial_state(nodes=(0, 0, 0, 0, 1, 1, 1, 1), cell_size=2)
    after = apply(state, died(5))
    assert (after.alive, after.dead, after.ranks) == ((0, 1, 3), (2,), (0, 1, 2, 3, 6, 7))
    assert apply(after, died(4)) is after, "its other rank went with it"


def test_who_is_lost_between_two_states():
    draw = random.Random(0)
    for size in (1, 2):
        before = now = next_generation(initial_state(nodes=(0, 0, 0, 0, 1, 1, 1, 1), cell_size=size))
        for incarnation in range(1, 40):
            rank = draw.randrange(8)
            event = draw.choice((died(rank), joined(rank, incarnation), NodeLost(node=rank // 4, t_s=1.0)))
            now = apply(now, event)
            assert lost_between(before, now) == set(before.ranks) - set(now.ranks)
            before = now if draw.random() < 0.3 else before


def test_ranks_of_a_cell_talk_to_their_likes():
    cell = Cell(rank=5, size=2)
    assert (cell.worker, cell.index, cell.ranks) == (2, 1, (4, 5))
    assert [one.rank for one in Cells(cell).counterparts(0)] == [1]
    names = {Cell(rank=one, size=2).named("0>2", one - 4) for one in (4, 5)}
    assert len(names) == 2, "two groups, with an address each"
    assert [one.rank for one in Cells(Cell(rank=5)).counterparts(3)] == [3]


def test_ranks_of_a_cell_have_shards_and_parts_of_the_sequence():
    """Megatron's order is tensor, then context parallelism (core_v0.16.1 core/parallel_state.py, "tp-cp-ep-dp-pp")."""
    cell = Cell(rank=13, size=8, context=4)
    assert (cell.worker, cell.index, cell.tensor_rank, cell.context_rank) == (1, 5, 1, 2)
    assert (cell.tensor_ranks, cell.context_ranks) == ((12, 13), (9, 11, 13, 15))
    assert Cells(cell).having(0, cell.index % cell.tensor, cell.tensor) == (1, 3, 5, 7)
    twin = Cell(rank=15, size=8, context=4)
    assert cell.named("0>1", 5) != twin.named("0>1", 7)


def test_ranks_that_share_out_experts_are_a_worker():
    """A cell of 2 x 4 tensor and expert ranks has four lanes, each of two ranks with a microbatch of their own."""
    gang = Cell.of(13, tensor=2, expert=4)
    assert (gang.size, gang.lanes, gang.lane, gang.tensor_rank) == (8, 4, 2, 1)
    assert (gang.lane_ranks, gang.expert_ranks) == ((12, 13), (9, 11, 13, 15))
    assert (gang.expert_tensor_ranks, gang.expert_part_ranks) == ((12, 13), (8, 9, 10, 11, 12, 13, 14, 15))
    assert Cells(gang).having(0, 1, gang.tensor) == (1, 3, 5, 7), (
        "gradients of what is cut by tensor parallelism are summed here"
    )
    assert Cells(gang).having(0, gang.index, gang.expert_parts) == (5,), "and of experts there"


@pytest.mark.parametrize(
    ("sizes", "size", "lanes", "parts"),
    [
        ({"tensor": 2, "expert": 2, "expert_tensor": 1}, 2, 1, 2),  # experts over the tensor-parallel ranks
        ({"tensor": 4, "expert": 2, "expert_tensor": 1}, 4, 1, 4),  # twice over them
        ({"tensor": 2, "expert": 4, "expert_tensor": 1}, 4, 2, 4),
        ({"tensor": 1, "context": 2, "expert": 2}, 2, 1, 2),
        ({"tensor": 3, "expert": 2, "expert_tensor": 1}, 6, 2, 6),
        ({"tensor": 2, "context": 2}, 4, 1, 2),
    ],
)
def test_a_worker_has_the_whole_sequence_and_all_experts(sizes, size, lanes, parts):
    """As Megatron lays them out over the ranks of a stage (core_v0.16.1 core/parallel_state.py, ``RankGenerator``)."""
    cells = [Cell.of(rank, **sizes) for rank in range(2 * size)]
    assert {(one.size, one.lanes, one.parts.count) for one in cells} == {(size, lanes, parts)}
    for one in cells:
        assert one.rank in one.lane_ranks
        assert one.rank in one.expert_ranks
        assert set(one.expert_ranks) <= set(one.ranks)
        assert len({other % one.expert_parts for other in one.expert_part_ranks}) == one.expert_parts
        assert {
            cells[rank].tensor_rank
            for rank in Cells(one).having(0, one.index % one.parts.count, one.parts.count)
        } == {one.tensor_rank}


def test_a_node_takes_the_gangs_along_that_reach_into_it():
    state = initial_state(nodes=(0, 0, 1, 1, 2, 2, 2, 2), cell_size=4)
    assert apply(state, NodeLost(node=1, t_s=1.0)).dead == (0,)
    assert apply(state, NodeLost(node=2, t_s=1.0)).dead == (1,)


def test_a_rank_that_finished_may_die_and_is_not_taken_back(state):
    after = apply(apply(state, RankFinished(rank=1, generation=1)), died(1))
    assert (after.dead, after.finished) == ((1,), {1})
    assert apply(after, joined(1)) is after, "the others are about to finish, too"
    again = next_generation(after)
    assert 1 not in again.members
    assert apply(again, joined(1)).fresh == {1}


def test_who_tells_of_a_process_that_was_replaced_is_late(state):
    """An agent that was frozen for as long as it took."""
    again = apply(apply(state, died(1)), joined(1, incarnation=10_000))
    assert 1 in again.alive
    assert apply(again, died(1)) is again
    assert apply(again, died(1, incarnation=10_000)).dead == (1,)


def test_a_retry_changes_no_membership(state):
    assert apply(state, Retry(rank=0, generation=1, reason="connection reset")) is state


def test_finished_in_an_earlier_generation_does_not_count(state):
    """It has to help with the next one first."""
    later = next_generation(state)
    assert apply(later, RankFinished(rank=1, generation=1)) is later


def joined(rank: int, incarnation: int = 1, node: int = 0) -> RankJoined:
    return RankJoined(rank=rank, node=node, incarnation=incarnation)


def test_a_worker_lives_again_when_all_its_ranks_have_joined():
    state = next_generation(initial_state(nodes=(0, 0, 1, 1), cell_size=2))
    state = apply(state, died(3))
    half = apply(state, joined(3))
    assert (half.alive, half.joining) == ((0,), {3})
    back = apply(half, joined(2, node=5))
    assert (back.alive, back.joining, back.worker_of(3).node) == ((0, 1), frozenset(), 5)
    assert back.incarnations == ((2, 1), (3, 1))
    assert back.members == state.members, "of no generation yet"


def test_a_rank_that_dies_while_it_waits_for_its_cell():
    state = initial_state(nodes=(0, 0, 0, 0), cell_size=2)
    state = apply(apply(apply(state, died(3)), joined(3)), died(3, incarnation=1))
    assert (state.joining, len(state.failure_times_s)) == (frozenset(), 1)
    assert apply(state, joined(2)).alive == (0,)


def test_of_a_cell_that_holds_nothing_yet_the_rest_waits_on():
    state = next_generation(initial_state(nodes=(0,) * 4, cell_size=2))
    state = apply(state, died(1))
    for rank in (0, 1):
        state = apply(state, RankJoined(rank=rank, node=0, incarnation=1))
    assert (state.fresh_ranks, state.waiting_ranks) == ((0, 1), (0, 1))
    state = apply(state, died(1, incarnation=1))
    assert (state.alive, state.waiting_ranks) == ((1,), (0,)), "rank 0 has lost nothing"
    state = apply(state, RankJoined(rank=1, node=0, incarnation=2))
    assert (state.alive, state.fresh_ranks) == ((0, 1), (0, 1))
    assert dict(state.incarnations) == {0: 1, 1: 2}


def test_a_living_rank_cannot_be_replaced(state):
    assert apply(state, joined(1)) is state


def test_an_offer_counts_once_all_its_members_are_live_in_it(state):
    state = apply(apply(state, died(2)), joined(2))
    offered = offer_generation(state)
    assert (offered.generation, offered.offered, offered.offered_members) == (1, 2, {0, 1, 2, 3})
    for rank in (0, 1, 3):
        offered = apply(offered, GenerationLive(ranks=(rank,), generation=2))
        assert offered.generation == 1
    entered = apply(offered, GenerationLive(ranks=(2,), generation=2))
    assert (entered.generation, entered.offered, entered.members, entered.is_live) == (
        2,
        0,
        {0, 1, 2, 3},
        True,
    )


def test_a_loss_ends_an_offer_and_its_number_is_not_used_again(state):
    offered = offer_generation(state)
    after = next_generation(apply(offered, died(0)))
    assert (after.generation, after.offered, after.members) == (3, 0, {1, 2, 3})
    late = apply(after, GenerationLive(ranks=(1,), generation=2))
    assert late.live == frozenset()


def test_live_once_every_member_said_so(state):
    for rank in (0, 2, 3):
        state = apply(state, GenerationLive(ranks=(rank,), generation=1))
        assert not state.is_live
    assert apply(state, GenerationLive(ranks=(1,), generation=1)).is_live


def test_reports_of_another_generation_do_not_count(state):
    for rank in range(4):
        state = apply(state, GenerationLive(ranks=(rank,), generation=0))
        state = apply(state, GenerationLive(ranks=(rank,), generation=2))
    assert state.live == frozenset()


def test_a_new_generation_is_not_live_until_reported_again(state):
    for rank in range(4):
        state = apply(state, GenerationLive(ranks=(rank,), generation=1))
    assert not next_generation(state).is_live
    assert next_generation(state).alive == state.alive


def test_a_member_that_dies_before_it_reported_does_not_hold_up_the_others(state):
    """The survivors' reports are complete, but a step may only have been committed with all: no false 'live'."""
    for rank in (0, 1, 2):
        state = apply(state, GenerationLive(ranks=(rank,), generation=1))
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
            GenerationLive(ranks=(rank,), generation=rng.randrange(4)),
            Retry(rank=rank, generation=1, reason="x"),
            RankFinished(rank=rank, generation=rng.randrange(4)),
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
    events = (died(1), NodeLost(node=0, t_s=1.0), GenerationLive(ranks=(1,), generation=2),
              RankFinished(rank=0, generation=1), RankJoined(rank=1, node=0, incarnation=2),
              OfferFailed(rank=1, generation=2, reason="x"),
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
    job(least_holders=8).check(8)
    job(least_holders=2, pipeline_model_parallel_size=1).check(1)  # as far as there are workers


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        (
            {"tensor_model_parallel_size": 4},
            8,
            "--pipeline-model-parallel-size 4 times --tensor-model-parallel-size 4",
        ),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 3},
            8,
            "times --tensor-model-parallel-size 2 times --context-parallel-size 3. Start a multiple of 24 ranks",
        ),
        ({}, 6, "world size (6 ranks) is not divisible by --pipeline-model-parallel-size 4"),
        (
            {"pipeline_model_parallel_size": 1, "expert_model_parallel_size": 4},
            6,
            "size 1 times 4 replicas that share out experts (--expert-model-parallel-size 4). Start a multiple of 4",
        ),
        (
            {"pipeline_model_parallel_size": 1, "expert_model_parallel_size": 4, "num_microbatches": 1},
            8,
            "4 microbatch(es) per global batch cannot feed 2 pipelines, each of 4 at a time,",
        ),
        ({"pipeline_model_parallel_size": 0}, 8, "Start a multiple of 1 ranks"),
        ({"num_layers": 5}, 8, "--pipeline-model-parallel-size 4 exceeds --num-layers 3"),
        ({"num_microbatches": 1}, 8, "1 microbatch(es) per global batch cannot feed 2 pipelines"),
        (
            {"least_holders": 9},
            8,
            "-level 8 is to have 9 holders of each layer, and the job has 8 worker(s) of 1 rank(s). "
            "Use at most 7",
        ),
    ],
)
def test_a_job_that_does_not(changes, world_size, message):
    with pytest.raises(ConfigError) as caught:
        job(**changes).check(world_size)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
