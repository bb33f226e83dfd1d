"""Cells of tensor- and context-parallel ranks under the rules of CUDA and NCCL: they compute together, leave together,
and what is left of one comes back with fewer ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.errors import JobStopped  # noqa: E402
from tests.execute.stack import WIDTH  # noqa: E402
from tests.strict.cases import PHASES, POINTS, profile  # noqa: E402
from tests.strict.cells import undisturbed  # noqa: E402
from tests.strict.job import Case, Kill, run  # noqa: E402


def check(one, seed):
    """The job ends as one process does, or, with a layer lost, says so."""
    try:
        ended = run(one, seed)
    except JobStopped:
        assert len(one.kills) > 1, "one death is survived"
        return None
    losses, weights = undisturbed(one.steps)
    assert [ended.losses[step] for step in range(one.steps)] == pytest.approx(losses, rel=1e-12)
    found = {}
    for rank in ended.alive:
        low = rank.cell.held_shards.start * (WIDTH // rank.cell.full_tensor)
        for layer, own in rank.weights.items():
            for at, column in enumerate(own.t(), start=low):
                assert torch.equal(found.setdefault((layer, at), column), column), "holders differ"
                assert torch.allclose(column, weights[layer][:, at], rtol=1e-12, atol=1e-14)
    assert set(found) == {(layer, at) for layer in weights for at in range(WIDTH)}
    return ended


def job(*, tensor, context=1, point="", rank=1, **others):
    kills = (Kill(rank=rank, step=1, point=point),) if point else ()
    return Case(
        stages=2, replicas=2, tensor=tensor, context=context, profile=profile(), kills=kills, **others
    )


SHAPES = ((2, 1), (1, 2), (2, 2))
"""(tensor-parallel ranks, context-parallel ones)."""


def test_cells_compute_together():
    check(job(tensor=2, context=2, steps=1), seed=2)


def interrupted():
    """A job of context-parallel cells; of what is queued behind the failure much is exchanged within cells."""
    return job(tensor=1, context=2, point="backward", steps=3, flags={"policy": "reroute"}, one_queue=True)


def test_gradients_that_cells_have_made_of_garbage_do_not_count():
    """Behind a failure they exchange what an abort has left, so that the step is done again."""
    assert check(interrupted(), seed=1).outcomes() == ["redo"]


def test_gradients_made_of_garbage_are_seen(monkeypatch):
    from odyssey_megatron.execute.progress import Progress

    init = Progress.__init__

    def alone(self, *sizes, keeps, alone=True):
        init(self, *sizes, keeps=keeps)

    monkeypatch.setattr(Progress, "__init__", alone)
    with pytest.raises(AssertionError):
        check(interrupted(), seed=1)


def shrinking(tensor, context, **others):
    """Worker 1 loses a rank, and comes back as one that is alone."""
    of = {"point": "backward", "rank": 2, "steps": 7, "shrinks_to": 1, "flags": {"policy": "replan"}}
    return job(tensor=tensor, context=context, **(of | others))


@pytest.mark.parametrize(("tensor", "context"), [pytest.param(2, 1, marks=pytest.mark.matrix), (1, 2)])
def test_what_is_left_of_a_cell_comes_back_smaller(tensor, context):
    ended = check(shrinking(tensor, context), seed=0)
    assert ended.entered[-1].shapes == ((1, 2),)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("tensor", "context"), SHAPES)
def test_killed_anywhere(tensor, context, point):
    for seed in range(6):
        one = job(tensor=tensor, context=context, point=point, steps=3, one_queue=bool(seed % 2))
        check(one, seed)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("point", [*POINTS, *PHASES])
@pytest.mark.parametrize(("tensor", "context"), SHAPES[:2])
def test_killed_beside_a_smaller_cell(tensor, context, point):
    """Another one, as the smaller cell is filled, and as it trains."""
    for generation in (3, 4):
        step = -1 if point in PHASES else 3 + generation % 2
        kills = (
            Kill(rank=2, step=0, point="backward"),
            Kill(rank=7, step=step, point=point, generation=generation if point in PHASES else 0),
        )
        check(replace(shrinking(tensor, context), kills=kills), seed=generation)
