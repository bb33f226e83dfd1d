"""Workers that go on with fewer ranks: who is in, who has what, and who exchanges with whom. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.cluster.events import Event, GenerationLive, RankDied, RankJoined, RankReturned
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.shapes import Each
from odyssey_megatron.cluster.state import (
    ClusterState,
    apply,
    initial_state,
    next_generation,
    offer_generation,
    without_fresh,
)
from odyssey_megatron.errors import EXIT_FENCED
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.groups import group_members
from odyssey_megatron.plan.plan import Plan, Transfer
from odyssey_megatron.plan.scheduling.generate import build_schedule
from odyssey_megatron.plan.scheduling.programs import Programs
from tests.plan.samples import uniform_costs

SIZE, WORKERS = 4, 3
NOBODY = frozenset[int]()


def died(rank: int, code: int = -9) -> RankDied:
    """Its newest process."""
    return RankDied(rank=rank, code=code, cause="killed", incarnation=9, t_s=1.0)


def joined(rank: int, size: int = 0, incarnation: int = 1) -> RankJoined:
    return RankJoined(rank=rank, node=0, incarnation=incarnation, size=size)


def live(state: ClusterState, number: int) -> ClusterState:
    for rank in sorted(state.offered_members if number == state.offered else state.members):
        state = apply(state, GenerationLive(ranks=(rank,), generation=number))
    return state


def trained() -> ClusterState:
    state = next_generation(initial_state(nodes=(0,) * SIZE * WORKERS, cell_size=SIZE))
    return live(state, state.generation)


def smaller(state: ClusterState, worker: int, size: int) -> ClusterState:
    """``worker`` has lost its last rank for good, and what is left of it has joined and trains."""
    state = next_generation(apply(state, died(worker * SIZE + SIZE - 1)))
    state = live(state, state.generation)
    for rank in range(worker * SIZE, worker * SIZE + size):
        state = apply(state, joined(rank, size))
    assert worker in state.fresh
    state = offer_generation(state)
    return live(state, state.offered)


def test_what_is_left_of_a_cell_is_a_fresh_worker_with_a_share():
    state = smaller(trained(), 1, 2)
    assert not state.fresh
    worker = state.workers[1]
    assert (worker.ranks, worker.missing, worker.share, worker.size) == ((4, 5), (6, 7), 0.5, 2)
    assert state.shapes == ((1, 2),)
    assert state.members == {0, 1, 2, 3, 4, 5, 8, 9, 10, 11}
    assert state.cell_size == SIZE
    assert apply(state, died(6)) is state, "of the ranks that it does without none can be lost"


def test_it_is_lost_as_a_whole_and_may_come_back_in_any_size():
    lost = apply(smaller(trained(), 0, 2), died(1))
    assert lost.dead == (0,)
    assert lost.workers[0].ranks == (0, 1, 2, 3), "it may be whole again, or smaller still"
    assert apply(lost, joined(0, 1)).shapes == ((0, 1),)
    whole = lost
    for rank in range(4):
        assert 0 not in whole.fresh
        whole = apply(whole, joined(rank))
    assert whole.fresh == {0}
    assert whole.shapes == ()


def test_cells_of_two_sizes_do_not_mix():
    state = apply(apply(trained(), died(3)), joined(0, 2))
    state = apply(state, joined(1))
    assert not state.fresh, "the other one waits for all four"


def test_once_its_other_ranks_are_back_it_leaves_between_two_steps_and_nothing_is_lost():
    state = smaller(trained(), 1, 2)
    before = state.failure_times_s
    state = apply(state, RankReturned(rank=6))
    assert not state.can_be_whole
    state = apply(state, RankReturned(rank=7))
    assert state.can_be_whole == {1}
    state = offer_generation(state, state.can_be_whole)
    assert state.offered_members.isdisjoint({4, 5})
    gone = apply(state, died(4, EXIT_FENCED))
    assert 1 not in gone.alive, "it has left before all others have said that they are in the next generation"
    back = gone
    for rank in range(4, 8):
        back = apply(apply(back, died(rank, EXIT_FENCED)), joined(rank, incarnation=2))
    begun = live(back, back.offered)
    assert begun.fresh == {1}, "it has come back before they have said so"
    assert 1 in begun.alive
    for way in (gone, state):
        begun = live(way, way.offered)
        assert (begun.dead, begun.failure_times_s, begun.leaving) == ((1,), before, NOBODY)
        for rank in range(4, 8):
            begun = apply(apply(begun, died(rank, EXIT_FENCED)), joined(rank, incarnation=2))
        assert begun.fresh == {1}
        assert begun.shapes == ()
        assert not begun.returned
    killed = apply(state, died(4))
    assert killed.failure_times_s == (*before, 1.0), "a real death is one"


def test_a_returned_rank_that_dies_is_waited_for_again():
    state = smaller(trained(), 1, 2)
    for rank in (6, 7):
        state = apply(state, RankReturned(rank=rank))
    assert not apply(state, died(7)).can_be_whole


events = st.one_of(
    st.builds(died, st.integers(0, SIZE * WORKERS - 1), st.sampled_from([-9, EXIT_FENCED])),
    st.builds(joined, st.integers(0, SIZE * WORKERS - 1), st.sampled_from([0, 1, 2, 3]), st.integers(1, 3)),
    st.builds(lambda rank: RankReturned(rank=rank), st.integers(0, SIZE * WORKERS - 1)),
    st.sampled_from(["live", "offer", "leave", "recover"]),
)


def after(state: ClusterState, event: Event | str) -> ClusterState:
    if event == "live":
        return live(state, state.offered or state.generation)
    if event in ("offer", "leave") and state.is_live and not state.offered:
        return offer_generation(state, state.can_be_whole if event == "leave" else NOBODY)
    if event == "recover" and without_fresh(state).alive:
        return next_generation(state)
    return state if isinstance(event, str) else apply(state, event)


@settings(max_examples=300, deadline=None)
@given(st.lists(events, max_size=40))
def test_whatever_happens_each_worker_has_its_ranks_once(story):
    state = trained()
    for event in story:
        state = after(state, event)
        for worker in state.workers:
            first = worker.worker * SIZE
            assert worker.ranks + worker.missing == tuple(range(first, first + SIZE))
            assert worker.share == len(worker.ranks) / SIZE
            assert worker.alive or not worker.missing
        assert state.fresh <= set(state.alive)
        assert state.can_be_whole <= set(state.alive)
        assert state.joining.isdisjoint(state.ranks)
        assert {rank for rank, _ in state.joining_smaller} <= state.joining
        assert dict(state.shapes).keys() <= set(state.alive)


SHAPES = [{}, {1: 3}, {0: 2, 2: 3}, {0: 1, 1: 2}, {0: 3, 1: 3, 2: 1}]


def cell_of(rank: int, size: int, shapes: dict[int, int], context: int = 1) -> Cell:
    tensor = size // context
    whole = Cell.of(rank, tensor=tensor, context=context, expert_tensor=tensor)
    return whole.smaller(shapes.get(rank // size, 0))


def members_of(size: int, shapes: dict[int, int]) -> list[int]:
    return [w * size + index for w in range(WORKERS) for index in range(shapes.get(w, size))]


WHOLE = [
    {"tensor": 6},
    {"tensor": 2, "context": 3},
    {"tensor": 3, "context": 2},
    {"tensor": 4, "context": 4},
    {"context": 6},
    {"context": 4, "context_levels": (2, 2)},
    {"expert": 4},
    {"expert": 6},
    {"tensor": 2, "expert": 4},
    {"context": 2, "expert": 2},
    {"tensor": 2, "context": 2, "expert": 4},
    {"context": 4, "expert": 2},
    {"context": 4, "context_levels": (2, 2), "expert": 8},
]


def assert_given_all_once(here, one, counterparts):
    """The ranks ``here`` give rank ``one`` of another worker all that it needs, once; who gives anything is among its
    ``counterparts``.
    """
    for cuts in (False, True):
        gives = {other.rank: other.gives(one, cuts=cuts) for other in here}
        assert sorted(at for own in gives.values() for at in own) == sorted(one.pieces(cuts))
        assert {rank for rank, own in gives.items() if own} <= counterparts
    moves = {other.rank: other.parts.given_to(one.parts) for other in here}
    assert sorted(part for own in moves.values() for part in own) == list(one.parts.held)
    assert all(part in other.parts.held for other in here for part in moves[other.rank])
    assert {rank for rank, own in moves.items() if own} <= counterparts


@pytest.mark.parametrize("sizes", WHOLE, ids=str)
def test_two_ranks_agree_on_what_they_have_in_common(sizes):
    """Between cells of any two divisions: each rank is given all that it needs, once."""
    whole = Cell.of(0, **{"tensor": 1, **sizes})
    divisions = whole.divisions(tensor=True)
    assert divisions[0] == 1
    assert divisions[-1] == whole.size // (whole.tensor if whole.expert > 1 else 1)
    sizes = [whole.size // each for each in divisions]
    for ours, theirs in product(sizes, sizes):
        here, there = whole.of_worker(0, ours), whole.of_worker(1, theirs)
        for one in there:
            counterparts = {other.rank for other in Cells(one, {0: ours}).counterparts(0)}
            assert_given_all_once(here, one, counterparts)
            if ours == theirs:
                for cuts in (False, True):
                    assert here[one.index].gives(one, cuts=cuts) == one.pieces(cuts), "all of it, as it lies"
            for other in (other for other in here if other.rank in counterparts):
                assert one.rank in {back.rank for back in Cells(other, {1: theirs}).counterparts(1)}
                assert one.named("a", other.rank) == other.named("a", one.rank)
        slots = [one.parts.slot(part) for one in there for part in one.parts.held]
        assert len(slots) == len(set(slots))
        assert set(slots) <= set(range(whole.size))
        for one in there:
            assert all(one.parts.fills(one.parts.slot(part)) for part in one.parts.held)
            assert [one.parts.slot(part) % whole.parts.count for part in one.parts.held] == [*one.parts.held]
            for parts in {whole.full_tensor, whole.parts.of_experts, whole.parts.count}:
                having = {part: Cells(whole, {1: theirs}).having(1, part, parts) for part in range(parts)}
                assert [part for part in having if one.rank in having[part]] == sorted(one.parts.own(parts))
                assert len({len(ranks) for ranks in having.values()}) == 1


@pytest.mark.parametrize(
    ("ranks", "experts", "tensor"), [(4, 8, 1), (8, 16, 1), (8, 128, 1), (4, 12, 2), (6, 12, 1)]
)
def test_ranks_of_an_uneven_gang_have_all_lanes_and_experts_between_them(ranks, experts, tensor):
    """Beside gangs of any other size: each rank is given all that it needs, once, and of each run by one rank."""
    job = JobSpec(
        num_layers=4, pipeline_model_parallel_size=1, tensor_model_parallel_size=tensor, num_microbatches=4,
        tokens_per_step=1, train_steps=1, expert_model_parallel_size=ranks, num_experts=experts,
    )  # fmt: skip
    whole, sizes = job.cell(0), job.cell_sizes
    assert sizes == tuple(one * tensor for one in range(ranks, 0, -1))
    even = replace(job, even_gangs_only="one module").cell_sizes
    assert even == tuple(one for one in sizes if whole.size % one == 0)
    for ours, theirs in product(sizes, sizes):
        among = whole.among({0: ours, 1: theirs})
        here, there = among.of_worker(0, ours), among.of_worker(1, theirs)
        assert bool(among.runs) == any(whole.size % one for one in (ours, theirs))
        for gang in (here, there):
            assert sum(one.places for one in gang) == whole.size
            assert sorted(lane for one in gang for lane in one.held_lanes) == sorted([*range(ranks)] * tensor)
            assert sorted(x for one in gang for x in one.held_experts) == sorted([*range(experts)] * tensor)
            counts = [len(one.held_experts) for one in gang]
            assert max(counts) - min(counts) <= 1
            assert max(len(one.held_lanes) for one in gang) == gang[0].lane_each
            held = [part for one in gang for part in one.parts.held]
            assert (
                sorted(held) == [*range(among.parts.count)] if among.runs or len(gang) == whole.size else held
            )
        for one in there:
            assert_given_all_once(here, one, {other.rank for other in Cells(one, {0: ours}).counterparts(0)})
            assert [one.parts.slot(part) % among.parts.count for part in one.parts.held] == [*one.parts.held]
            for parts in {among.full_tensor, among.parts.of_experts}:
                having = {part: Cells(among, {1: theirs}).having(1, part, parts) for part in range(parts)}
                assert [part for part in having if one.rank in having[part]] == sorted(one.parts.own(parts))
                assert len({len(ranks) for ranks in having.values()}) == 1


def test_experts_of_an_uneven_gang_are_spread_evenly_and_lanes_dealt_out_in_turn():
    gang = Cell.of(8, tensor=1, expert=4, experts=8).smaller(3)
    ranks = gang.of_worker(1, 3)
    assert [[*one.held_experts] for one in ranks] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [[*one.held_lanes] for one in ranks] == [[0, 3], [1], [2]]
    assert gang.runs == (0, 2, 3, 4, 6)
    assert [one.parts.each.runs for one in ranks] == [((0, 2), (2, 3)), ((3, 4), (4, 6)), ((6, 8),)]
    beside = gang.of_worker(0)
    assert [one.parts.held for one in beside] == [(0,), (1, 2), (3,), (4,)]
    assert beside[0].among({}).runs == ()
    assert Cell.of(0, tensor=1, expert=4, experts=4).uneven_sizes == (), "an expert is not divided"
    assert Cell.of(0, tensor=1, context=4, expert=4, experts=8).uneven_sizes == ()


def test_a_rank_of_a_smaller_gang_has_neighbouring_lanes_and_experts():
    """Where Megatron puts the experts of as many expert-parallel ranks as there are then."""
    halves = Cell.of(0, tensor=2, expert=4).of_worker(1, 4)
    assert [one.rank for one in halves] == [8, 9, 10, 11]
    assert [(one.size, one.lanes, one.expert, one.tensor) for one in halves] == [(4, 2, 2, 2)] * 4
    assert [[*one.held_lanes] for one in halves] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one.parts.held for one in halves] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [one.expert_ranks for one in halves] == [(8, 10), (9, 11), (8, 10), (9, 11)]
    assert {one.parts.each for one in halves} == {Each(1, 2)}
    (alone,) = Cell.of(0, tensor=1, expert=4).of_worker(0, 1)
    assert ([*alone.held_lanes], alone.parts.held, alone.expert_ranks) == ([0, 1, 2, 3], (0, 1, 2, 3), (0,))


def test_context_ranks_are_put_together_first():
    """Their number changes nothing of a layer."""
    whole = Cell.of(0, tensor=4, context=4)
    assert whole.divisions(tensor=True) == (1, 2, 4, 8, 16)
    assert whole.divisions(tensor=False) == (1, 2, 4)
    smaller = [whole.smaller(16 // each) for each in whole.divisions(tensor=True)]
    sizes = [(one.tensor, one.context) for one in smaller]
    assert sizes == [(4, 4), (4, 2), (4, 1), (2, 1), (1, 1)]
    assert Cell.of(0, tensor=1, context=4, context_levels=(2, 2)).divisions(tensor=True) == (1, 4)
    assert Cell.of(0, tensor=2, expert=4).divisions(tensor=True) == (1, 2, 4), "its lanes"
    assert Cell.of(0, tensor=1, expert=6).divisions(tensor=True) == (1, 2, 3, 6)
    assert Cell.of(0, tensor=2, expert=4, expert_tensor=1).divisions(tensor=True) == (1,)
    assert Cell.of(0, tensor=2, context=3).divisions(tensor=True) == (1, 3, 6)


@pytest.mark.parametrize(
    ("shapes", "context", "tagged"),
    [*product(SHAPES, [1], [False, True]), *product([{}, {1: 3}, {0: 1, 1: 3}], [2], [False, True])],
)
def test_all_of_a_group_know_the_same_of_it(shapes, context, tagged):
    routes = (pipeline_route((0, 1), (2, 4), (0, 1)), pipeline_route((2, 1), (2, 4), (2, 3)))
    layout = layout_from_routes(4, routes)
    plan = Plan(
        policy="",
        layout=layout,
        programs=Programs.from_text(build_schedule(layout, uniform_costs(4)).to_text()),
        transfers=(Transfer(layer=0, source=0, target=1), Transfer(layer=2, source=2, target=0)),
        step_s=0.0,
        bound_s=0.0,
        transition_s=0.0,
        peak_bytes=(),
    )
    everyone = tuple(members_of(6, shapes))
    known: dict[str, tuple[int, ...]] = {}
    for rank in everyone:
        for name, ranks in group_members(
            plan, everyone, Cells(cell_of(rank, 6, shapes, context), shapes), tagged=tagged
        ).items():
            assert rank in ranks
            assert len(set(ranks)) == len(ranks)
            assert known.setdefault(name, ranks) == ranks, name
    for name, ranks in known.items():
        for rank in ranks:
            assert name in group_members(
                plan, everyone, Cells(cell_of(rank, 6, shapes, context), shapes), tagged=tagged
            )
    blocks = {name: ranks for name, ranks in known.items() if name.startswith("block:0:")}
    assert len(blocks) == 6 // context, "a sum for each part"
    for name, ranks in blocks.items():
        part = int(name.rpartition(".")[2].partition("of")[0])
        assert all(part in cell_of(rank, 6, shapes, context).parts.held for rank in ranks)
