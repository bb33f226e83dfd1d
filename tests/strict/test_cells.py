"""Cells of tensor- and context-parallel ranks and gangs that share out experts, under the rules of CUDA and NCCL: they
compute together and leave together, what is left of one comes back with fewer ranks, and is whole again when it can be.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.strict.cases import GANGS, KINDS, PHASES, POINTS, TIGHT, changing, gangs, profile  # noqa: E402
from tests.strict.checking import check  # noqa: E402
from tests.strict.job import Case, Kill  # noqa: E402

TENSOR, CONTEXT, BOTH, EXPERT = {"tensor": 2}, {"context": 2}, {"tensor": 2, "context": 2}, {"expert": 2}
SHAPES = pytest.mark.parametrize("shape", [TENSOR, CONTEXT, BOTH, EXPERT], ids=str)
PAIRS = pytest.mark.parametrize("shape", [TENSOR, CONTEXT, EXPERT], ids=str)


CUT = {"stages": 1, "replicas": 4, "copies": 2, "flags": {"policy": "reroute"}}
"""A layer's optimizer state is in slices, also when a worker is lost: more hold it than keep each."""


def job(shape, *kills, **others):
    return Case(profile=profile(), kills=kills, **({"stages": 2, "replicas": 2} | shape | others))


@pytest.mark.parametrize(
    "shape", [BOTH, GANGS[1], GANGS[4], CONTEXT | EXPERT | CUT | {"replicas": 3}], ids=str
)
def test_cells_compute_together(shape):
    check(job(shape, steps=1), seed=2)


@pytest.mark.parametrize(("shape", "point"), [(CONTEXT, "reduce"), (EXPERT, "param_gather")], ids=str)
def test_killed_as_slices_are_exchanged(shape, point):
    """Of ranks that have the same gradients each sums a piece of their slices, cut over three workers in the end."""
    one = job(shape | CUT, Kill(rank=1, step=0, point=point), steps=2, **TIGHT)
    assert check(one, seed=0).outcomes()


INTERRUPTED = pytest.mark.parametrize(
    ("shape", "rank", "microbatch", "seed"), [(CONTEXT, 3, 3, 11), (EXPERT, 3, 3, 122)], ids=str
)


def interrupted(shape, rank, microbatch):
    """Of what is queued behind the failure much is exchanged within cells."""
    kill = Kill(rank=rank, step=1, point="backward", microbatch=microbatch)
    return job(shape, kill, steps=2, flags={"policy": "reroute"}, one_queue=True)


@INTERRUPTED
def test_gradients_that_cells_have_made_of_garbage_do_not_count(shape, rank, microbatch, seed):
    """Behind a failure they exchange what an abort has left, so that the step is done again."""
    assert check(interrupted(shape, rank, microbatch), seed).outcomes() == ["redo"]


@INTERRUPTED
def test_gradients_made_of_garbage_are_seen(monkeypatch, shape, rank, microbatch, seed):
    from odyssey_megatron.execute.progress import Progress

    init = Progress.__init__

    def alone(self, *sizes, keeps, alone=True):
        init(self, *sizes, keeps=keeps)

    monkeypatch.setattr(Progress, "__init__", alone)
    with pytest.raises(AssertionError):
        check(interrupted(shape, rank, microbatch), seed)


@pytest.mark.parametrize("number", range(5))
def test_random_gangs(number):
    """Their all-to-alls, sums over those who have the same experts, and all others' groups beside each other."""
    check(gangs(number), seed=number)


@pytest.mark.matrix
def test_gangs_go_on_with_a_step():
    """Where nothing of a backward was queued behind the failure, what they have done of it stays."""
    kill = Kill(rank=5, step=1, point="forward")
    one = job(EXPERT, kill, steps=2, flags={"policy": "reroute"})
    outcomes = {outcome for seed in range(4) for outcome in check(one, seed).outcomes()}
    assert outcomes <= {"resume", "redo", "finish"}
    assert "resume" in outcomes


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "seed"), [("come back", 0), ("move", 0)])
def test_plans_of_gangs_change_between_steps(kind, seed):
    ended = check(replace(changing(kind, 0), **EXPERT), seed)
    assert [one for one in ended.entered if one.planned]


BROKEN = Kill(rank=2, step=0, point="backward", breaks=True)
"""Of worker 1 one rank is lost for good: what is left comes back."""


def shrinking(shape, *kills, **others):
    of = {"steps": 6, "respawns": 1, "flags": {"policy": "replan"}}
    return job(shape, BROKEN, *kills, **(of | others))


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [TENSOR, CONTEXT, EXPERT], ids=str)
def test_what_is_left_of_a_cell_comes_back_smaller(shape):
    ended = check(shrinking(shape), seed=0)
    assert ended.entered[-1].shapes == ((1, 1),)


WHOLE = Kill(rank=4, step=4, point="backward", breaks=True)
"""Of worker 2 one is lost, too, and what is left of it completes worker 1."""


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [TENSOR, CONTEXT, EXPERT], ids=str)
def test_a_smaller_cell_becomes_whole_again(shape):
    """Its rank that trains leaves between two steps, and comes back beside the one that stood by."""
    ended = check(shrinking(shape, WHOLE, steps=12), seed=0)
    assert ((1, 1),) in [one.shapes for one in ended.entered]
    last = ended.entered[-1]
    assert last.shapes == ()
    assert last.members == (0, 1, 2, 3, 6, 7)


KEPT_THRICE = CUT | {
    "flags": {"policy": "replan", "redundancy": "state", "redundancy_level": 2},
}
"""Layers that have three holders however many workers are left, two of which keep each slice."""


def keeps_slices(worker, generation):
    layout = generation.plan.layout
    return any(
        worker in one.owners and len(one.owners) < len(holders)
        for layer, holders in enumerate(layout.all_holders)
        for one in layout.states[layer]
    )


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [TENSOR, CONTEXT, EXPERT], ids=str)
def test_a_smaller_cell_keeps_slices(shape):
    """What it keeps of each whole one's part comes from ranks of whole cells, and goes back to some."""
    ended = check(shrinking(shape, WHOLE, **KEPT_THRICE, steps=11), seed=0)
    assert any(keeps_slices(1, one) for one in ended.entered if one.shapes == ((1, 1),))
    assert (ended.entered[-1].shapes, ended.entered[-1].members) == ((), (0, 1, 2, 3, 6, 7))


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("part", range(10))
def test_all_random_gangs(part, copies):
    for number in range(part, 100, 10):
        for seed in range(4):
            check(gangs(number, copies=copies), seed=1000 * number + seed)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("part", range(5))
def test_gangs_killed_as_plans_change(part, kind, copies):
    for number in range(part, 15, 5):
        one = changing(kind, number, copies=copies)
        check(replace(one, **(TIGHT if number % 2 else {}), **EXPERT), seed=number)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", POINTS)
@SHAPES
def test_killed_anywhere(shape, point):
    for seed in range(6):
        kill = Kill(rank=1, step=1, point=point)
        check(job(shape, kill, steps=3, **(TIGHT if seed % 2 else {})), seed)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", [*POINTS, "param_gather"])
@SHAPES
def test_killed_anywhere_with_slices(shape, point):
    for seed in range(6):
        kill = Kill(rank=1, step=1, point=point)
        cut = CUT | {"replicas": 3 + seed // 2 % 2}
        check(job(shape | cut, kill, steps=3, **(TIGHT if seed % 2 else {})), seed)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cut", [{}, KEPT_THRICE], ids=["whole", "slices"])
@pytest.mark.parametrize("point", [*POINTS, "param_gather", *PHASES])
@PAIRS
def test_killed_beside_a_smaller_cell(shape, point, cut):
    """Another one, as the smaller cell is filled, and as it trains; it comes back, or completes the smaller one."""
    if point == "param_gather" and not cut:
        pytest.skip("no weights are gathered")
    for generation in (3, 4):
        step = -1 if point in PHASES else 3 + generation % 2
        kill = Kill(rank=7, step=step, point=point, generation=generation if point in PHASES else 0)
        for breaks in (False, True):
            check(shrinking(shape, replace(kill, breaks=breaks), steps=8, **cut), seed=generation)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", [*POINTS, *PHASES])
@PAIRS
def test_killed_as_a_smaller_cell_becomes_whole(shape, point):
    """Any worker, as the smaller one leaves, while it is away, and as it comes back."""
    for generation in range(5, 8):
        for rank in (0, 2, 6):
            step = -1 if point in PHASES else generation + 1
            kill = Kill(rank=rank, step=step, point=point, generation=generation, incarnation=2 * (rank == 2))
            check(shrinking(shape, WHOLE, kill, steps=12), seed=generation)
