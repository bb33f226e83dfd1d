"""Which cells a system trains with while single GPUs fail and are repaired."""

from __future__ import annotations

import random

import pytest

from odyssey_megatron.cluster.places import left_of_cells
from odyssey_megatron.studies.cells import Rule, broken_cells, whole_cells
from odyssey_megatron.studies.trace import ClusterChange, read_trace, with_repairs

TP8 = Rule(sizes=(8, 4, 2, 1), gpus_per_node=8, lost_s=200.0, again_s=100.0)
TP4 = Rule(sizes=(4, 2, 1), gpus_per_node=8, lost_s=200.0, again_s=100.0)


def changes(text: str, gpus: int = 16) -> tuple[ClusterChange, ...]:
    return read_trace(text + "\n1e9 end", gpus, gpus_per_node=8).changes


def seen(text: str, rule: Rule) -> list[tuple[float, dict[int, int], bool]]:
    """(when, worker -> its GPUs, whether one was lost) of 16 GPUs on two nodes."""
    whole = rule.sizes[0]
    found = broken_cells(changes(text), range(16 // whole), rule)
    return [
        (one.t_s, {worker: one.shapes.get(worker, whole) for worker in one.alive}, one.lost) for one in found
    ]


def test_cells_of_one_gpu_change_as_the_trace_says():
    """Such traces are played as they were before single GPUs were followed."""
    trace = with_repairs(range(12), mtbf_s=1000.0, repair_s=3000.0, duration_s=90_000.0, seed=2)
    alive, found = set(range(12)), list(whole_cells(trace.changes, range(12), 1))
    assert len(found) == len(trace.changes) > 40
    for change, now in zip(trace.changes, found, strict=True):
        alive = (alive - set(change.died)) | set(change.joined)
        assert (now.t_s, now.alive, now.lost) == (change.t_s, tuple(sorted(alive)), bool(change.died))
        assert not now.shapes


def test_a_cell_leaves_with_its_first_gpu_and_comes_back_with_its_last():
    found = whole_cells(changes("1 kill 9\n2 kill 10\n3 join 9\n4 kill 0\n5 join 10\n6 join 0"), range(2), 8)
    assert [(one.t_s, one.alive, one.lost) for one in found] == [
        (1.0, (0,), True), (4.0, (), True), (5.0, (1,), False), (6.0, (0, 1), False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "rule", "expected"),
    [
        pytest.param(
            "1000 kill 9\n5000 join 9", TP8,
            [(1000, {0: 8}, True), (1200, {0: 8, 1: 4}, False), (5000, {0: 8}, False), (5100, {0: 8, 1: 8}, False)],
            id="smaller, and whole again",
        ),
        pytest.param(
            "1000 kill 9\n2000 kill 1:4", TP8, [(1000, {0: 8}, True), (1200, {0: 8, 1: 4}, False)],
            id="a rank that stands by is not missed",
        ),
        pytest.param(
            "1000 kill 9\n1100 kill 1:6\n1110 kill 10\n1120 kill 11\n1130 kill 12", TP8,
            [(1000, {0: 8}, True), (1330, {0: 8, 1: 2}, False)],
            id="another loss before it goes on",
        ),
        pytest.param(
            "1000 kill 15\n2000 kill 8\n3000 join 8", TP8,
            [(1000, {0: 8}, True), (1200, {0: 8, 1: 4}, False), (2000, {0: 8}, True), (2200, {0: 8, 1: 4}, False)],
            id="another loss afterwards; while it stays broken it keeps its size",
        ),
        pytest.param(
            "1000 kill 1:*\n2000 join 1:*", TP8, [(1000, {0: 8}, True), (2000, {0: 8, 1: 8}, False)],
            id="nothing is left of a node",
        ),
        pytest.param(
            "1000 kill 1:*", TP4, [(1000, {0: 4, 1: 4}, True)], id="a node takes all of its cells",
        ),
        pytest.param(
            "1000 kill 9\n1050 join 9", TP8, [(1000, {0: 8}, True), (1150, {0: 8, 1: 8}, False)],
            id="repaired before it goes on: its ranks start once more",
        ),
        pytest.param(
            "1000 kill 0\n3000 kill 4", TP4,
            [(1000, {1: 4, 2: 4, 3: 4}, True), (1200, {0: 2, 1: 4, 2: 4, 3: 4}, False),
             (3000, {0: 2, 2: 4, 3: 4}, True), (3200, {0: 2, 1: 4, 2: 4, 3: 4}, False)],
            id="one cell is completed from another of its node",
        ),
        pytest.param(
            "1000 kill 9\n2000 join 9", Rule(sizes=(8, 4, 2, 1), gpus_per_node=8),
            [(1000, {0: 8, 1: 4}, True), (2000, {0: 8, 1: 8}, False)],
            id="without any waiting",
        ),
        pytest.param(
            "1000 kill 9\n2000 join 9", Rule(sizes=(8,), gpus_per_node=8, lost_s=200.0, again_s=100.0),
            [(1000, {0: 8}, True), (2000, {0: 8, 1: 8}, False)],
            id="no smaller cells: only the repaired rank is missing",
        ),
    ],
)  # fmt: skip
def test_what_is_left_of_a_cell(text, rule, expected):
    assert seen(text, rule) == expected


@pytest.mark.parametrize("rule", [TP8, TP4])
def test_it_becomes_what_the_agent_of_its_node_makes_of_it(rule):
    """With the losses far apart, in any order: what ``odyssey plan`` says of them, too."""
    rng, whole = random.Random(4), rule.sizes[0]
    for _ in range(60):
        lost = rng.sample(range(8), rng.randrange(1, 9))
        text = "\n".join(f"{(at + 1) * 10_000} kill {slot}" for at, slot in enumerate(lost))
        _, cells, _ = seen(text, rule)[-1]
        left = left_of_cells({rank: rank for rank in range(8)}, lost, rule.sizes)
        assert {worker: cells.get(worker, 0) for worker in range(8 // whole)} == (
            dict.fromkeys(range(8 // whole), whole) | left
        )


def test_random_traces_keep_count():
    """At any time no cell has more GPUs than live on its node, and in the end all are whole again."""
    trace = with_repairs(
        range(16), mtbf_s=500.0, repair_s=900.0, duration_s=200_000.0, seed=7, node_share=0.1, gpus_per_node=8
    )
    end = tuple(ClusterChange(t_s=1e6, joined=tuple(sorted(dead))) for dead in [_dead(trace.changes)] if dead)
    found = list(broken_cells((*trace.changes, *end), range(4), TP4))
    assert [one.t_s for one in found] == sorted(one.t_s for one in found)
    for one in found:
        dead = (
            _dead([change for change in trace.changes if change.t_s <= one.t_s]) if one.t_s < 1e6 else set()
        )
        for node in range(2):
            used = sum(one.shapes.get(worker, 4) for worker in one.alive if worker // 2 == node)
            assert used <= 8 - sum(gpu // 8 == node for gpu in dead)
    assert any(one.shapes for one in found)
    assert found[-1].alive == (0, 1, 2, 3)
    assert not found[-1].shapes


def _dead(changes) -> set[int]:
    dead = set[int]()
    for change in changes:
        dead = (dead | set(change.died)) - set(change.joined)
    return dead
