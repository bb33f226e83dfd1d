"""One rank's part of a generation: what all ranks read of it fits together."""

from __future__ import annotations

from collections import Counter

import pytest

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.plan.placing.groups import WORLD, timed_pairs
from odyssey_megatron.plan.sending.assignment import Assignment
from odyssey_megatron.plan.sending.generation import Generation
from tests.plan.test_wire import DEAD, WORKERS, planned

LIVING = tuple(rank for rank in range(WORKERS) if rank not in DEAD)


def assignments(policy="replan", *, fresh=(), first=False):
    before, plan = planned(policy)
    generation = Generation(
        number=2, members=LIVING, dead=tuple(DEAD), why="failure", previous=None if first else before.layout,
        plan=plan, plan_hash=plan.hash(), fresh=fresh, timed=timed_pairs(plan.layout) if first else (),
    )  # fmt: skip
    return [Assignment(generation=generation, cell=Cell(rank=rank)) for rank in LIVING]


@pytest.mark.parametrize("policy", ["reroute", "replan"])
@pytest.mark.parametrize("first", [False, True])
def test_whoever_is_in_a_group_has_all_others_in_it_too(policy, first):
    every = assignments(policy, first=first)
    named = {one.cell.rank: one.groups(tagged=False) for one in every}
    for rank, own in named.items():
        for name, ranks in own.items():
            assert rank in ranks
            assert all(named[other][name] == ranks for other in ranks)
    pairs = Counter(name for own in named.values() for name in own if name.startswith("pair:"))
    assert set(pairs.values()) == ({2} if first else set())
    assert all(set(own) >= {WORLD} for own in named.values())


def test_with_tags_messages_need_no_groups():
    for one in assignments(first=True):
        assert not any(">" in name or name.startswith("pair:") for name in one.groups(tagged=True))


def test_a_rank_that_has_just_come_has_nothing_and_needs_all_that_it_computes():
    for usual, fresh in zip(assignments(), assignments(fresh=LIVING), strict=True):
        assert usual.held_before
        assert not usual.is_fresh
        assert fresh.is_fresh
        assert fresh.held_before == ()
        assert fresh.needed_at_once >= usual.needed_at_once
        assert fresh.needed_at_once <= set(fresh.held)


def test_a_smaller_step_is_a_part_of_the_program():
    for one in assignments():
        half = one.step(6)
        assert set(half.program) < set(one.program) or not one.program
        assert {instr.microbatch for instr in half.program} <= {*range(-1, 6)}
        assert one.step(12).program == one.program
