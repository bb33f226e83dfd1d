"""Each kind of corruption of a good generation is found: who is to have what, and who is to send it."""

from dataclasses import replace

import pytest

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.parts import Parts
from odyssey_megatron.errors import PlanInvalid
from odyssey_megatron.plan.checking import units
from odyssey_megatron.plan.checking.units import check_parts, check_units
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import NOBODY, WHOLE, ring_of
from odyssey_megatron.plan.placing.transfer import plan_transfers
from odyssey_megatron.plan.plan import Plan, Transfer
from odyssey_megatron.plan.scheduling.programs import Programs
from odyssey_megatron.plan.sending.generation import Generation
from tests.plan.samples import uniform_costs

LAYERS, SIZE = 3, 4
CELL = Cell.of(0, tensor=SIZE)
NODES = dict.fromkeys(range(4), 0)


def layout(*workers: int, before: tuple[int, ...] = (), copies: int = 0) -> Layout:
    """All ``workers`` hold all layers; with ``copies``, in slices, whose places were those of ``before``."""
    ring = ring_of(workers, before, NODES, copies) if copies else ()
    return Layout(
        holders=(workers,) * LAYERS, routes=(), keepers=(ring,) * LAYERS if ring else (), copies=copies
    )


def joins(copies: int = 0) -> Generation:
    """Worker 1, of which two of four ranks are left, is filled by the others."""
    previous = layout(0, 2, 3, copies=copies)
    after = layout(0, 1, 2, 3, before=previous.keepers[0] if copies else (), copies=copies)
    transfers = plan_transfers(previous, after, (0, 2, 3), uniform_costs(LAYERS))
    assert transfers
    plan = Plan(
        policy="fill", layout=after, programs=Programs.from_text("0: STEP"), transfers=transfers, step_s=1.0,
        bound_s=1.0, transition_s=0.0, peak_bytes=(),
    )  # fmt: skip
    return Generation(
        number=3, members=(0, 1, 2, 3, 4, 5, *range(8, 16)), dead=(), why="joined", previous=previous, plan=plan,
        plan_hash="", planned=True, fresh=(4, 5), shapes=((1, 2),),
    )  # fmt: skip


def with_transfers(generation: Generation, transfers: tuple[Transfer, ...]) -> Generation:
    return replace(generation, plan=replace(generation.plan, transfers=transfers))


@pytest.mark.parametrize("copies", [0, 2, 3])
def test_a_plan_of_the_planner_is_sound(copies):
    check_units(joins(copies), CELL)


@pytest.mark.parametrize("copies", [0, 2, 3])
def test_a_transfer_that_is_missing(copies):
    good = joins(copies)
    for at, gone in enumerate(good.plan.transfers):
        left = good.plan.transfers[:at] + good.plan.transfers[at + 1 :]
        with pytest.raises(
            PlanInvalid, match=rf"worker {gone.target} is to keep .* of layer {gone.layer}, and lacks"
        ):
            check_units(with_transfers(good, left), CELL)


@pytest.mark.parametrize("copies", [2, 3])
def test_a_transfer_that_is_too_short(copies):
    good = joins(copies)
    first, *others = good.plan.transfers
    short = first._replace(span=(first.span[0], first.span[1] - 1))
    with pytest.raises(PlanInvalid, match=rf"lacks \[\({first.span[1] - 1}, {first.span[1]}\)\]"):
        check_units(with_transfers(good, (short, *others)), CELL)


def test_a_sender_that_has_it_not():
    """It holds the layer, but keeps no such slice; or it is fresh itself."""
    good = joins(2)
    first, *others = good.plan.transfers
    has = {first.source}
    for source in {0, 1, 2, 3} - has:
        moved = (first._replace(source=source), *others)
        if source == 1 or not _keeps(good.previous, source, first):
            with pytest.raises(PlanInvalid, match=f"worker {source} is to send .* of layer {first.layer} to"):
                check_units(with_transfers(good, moved), CELL)
        else:
            check_units(with_transfers(good, moved), CELL)


def _keeps(of: Layout, worker: int, sent: Transfer) -> bool:
    spans = of.spans_kept_by(worker)[sent.layer]
    covered = sum(max(0, min(b, sent.span[1]) - max(a, sent.span[0])) for a, b in spans)
    return covered == sent.span[1] - sent.span[0]


def test_a_worker_that_was_new_has_nothing():
    """Also if a process of it was there in the layout before."""
    good = joins()
    was_there = replace(good, previous=good.plan.layout)
    check_units(replace(was_there, fresh=()), CELL)
    with pytest.raises(PlanInvalid, match=rf"worker 1 is to keep .* lacks \[\(0, {WHOLE}\)\]"):
        check_units(with_transfers(was_there, ()), CELL)


def test_a_worker_whose_ranks_are_not_all_there():
    good = joins()
    with pytest.raises(PlanInvalid, match=r"worker 2 holds layers, and its rank\(s\) \[9\] are no members"):
        check_units(replace(good, members=tuple(one for one in good.members if one != 9)), CELL)
    with pytest.raises(
        PlanInvalid, match=r"worker 1 holds layers, and its rank\(s\) \[6, 7\] are no members"
    ):
        check_units(replace(good, shapes=()), CELL)


def test_a_size_that_no_cell_can_have():
    with pytest.raises(PlanInvalid, match=r"worker 1 has 3 rank\(s\); a cell of 4 can have \[1, 2, 4\]"):
        check_units(replace(joins(), shapes=((1, 3),)), CELL)


def test_a_part_that_no_rank_has(monkeypatch):
    """By a wrong rule of who has what: each rank of a smaller cell has its first part only."""
    monkeypatch.setattr(units, "check_parts", check_parts.__wrapped__)
    check_units(joins(), CELL)
    held = Parts.held
    monkeypatch.setattr(Parts, "held", property(lambda self: held.fget(self)[:1]))
    with pytest.raises(PlanInvalid, match=r"2 of 4 ranks lack part\(s\) \[1, 3\] of each layer"):
        check_units(joins(), CELL)


@pytest.mark.parametrize("experts", [4, 8])
def test_gangs_of_all_sizes_are_sound(experts):
    """Even ones, and uneven ones with experts enough."""
    gang = Cell.of(0, tensor=1, expert=4, experts=experts)
    check_parts(gang, frozenset((4, 2, 1, *gang.uneven_sizes)))
    assert gang.uneven_sizes == ((3,) if experts == 8 else ())


def test_a_place_that_nobody_has_any_more_needs_no_transfer():
    """As long as each slice has a keeper left, a lost worker's place stays empty."""
    previous = layout(0, 1, 2, 3, copies=2)
    ring = tuple(NOBODY if one == 1 else one for one in previous.keepers[0])
    after = replace(layout(0, 2, 3), keepers=(ring,) * LAYERS, copies=2)
    units.check_state(previous, after, (), {0, 2, 3})
    with pytest.raises(PlanInvalid, match="worker 3 is to keep"):
        units.check_state(previous, after, (), {0, 2})
