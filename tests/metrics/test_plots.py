"""The picture of a schedule."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from odyssey_megatron.metrics import plots
from odyssey_megatron.metrics.plots import LIGHT, schedule_figure
from odyssey_megatron.metrics.traces import Box, ExecutedStep


def executed(workers: int, microbatches: tuple[int, ...]) -> ExecutedStep:
    boxes = [
        Box(rank=rank, kind=kind, microbatch=one, first=0, last=3, start_s=start, end_s=start + 1.0)
        for rank in range(workers)
        for at, one in enumerate(microbatches)
        for kind, start in (("F", 2.0 * at), ("B", 2.0 * at + 1.0))
    ]
    return ExecutedStep(step=0, generation=1, boxes=tuple(boxes))


def artists(workers: int, microbatches: tuple[int, ...]) -> tuple[int, int, int]:
    """The collections and texts of the plot, and the boxes and numbers that they draw."""
    axes = schedule_figure([("a step", executed(workers, microbatches), frozenset())], LIGHT).axes[0]
    drawn = sum(len(one.get_paths()) for one in axes.collections)
    return len(axes.collections), len(axes.texts), drawn


def test_artists_do_not_grow_with_what_is_drawn():
    # Each takes a millisecond or more: by one for each box a page of 256 GPUs took most of a minute.
    few, many = artists(1, (0,)), artists(8, tuple(range(12)))
    assert few[:2] == many[:2]
    assert (few[2], many[2]) == (2 * 2, 2 * 2 * 8 * 12)  # a forward and a backward, each with its number


def test_who_is_gone_is_lost_only_if_dead():
    both, one = executed(3, (0,)), executed(1, (0,))
    axes = schedule_figure([("before", both, frozenset()), ("after", one, frozenset({2}))], LIGHT).axes
    assert not axes[0].texts
    assert [text.get_text() for text in axes[1].texts] == ["idle", "lost"]


def test_who_has_come_back_is_not_lost(monkeypatch):
    """Rank 1 dies in generation 2, is back in 3, and rank 2 dies in 4; no step of 2 and 3 was traced."""
    drawn = []
    monkeypatch.setattr(plots, "_picture", lambda *_: None)
    monkeypatch.setattr(plots, "_schedule_picture", lambda *asked: drawn.append(asked[-1]))
    traced = (executed(3, (0,)), replace(executed(1, (0,)), step=9, generation=4))
    run = SimpleNamespace(
        traced=traced,
        steps=traced,
        recoveries=[SimpleNamespace(generation=2, dead=(1,)), SimpleNamespace(generation=4, dead=(2,))],
        members={1: frozenset({0, 1, 2}), 2: frozenset({0, 2}), 4: frozenset({0, 1})},
    )
    plots.all_figures(run, None)
    assert drawn == [{2}]


@pytest.mark.parametrize("microbatches", [(-1,), (10**90,)])
def test_boxes_without_a_number_or_too_narrow_for_theirs_are_drawn(microbatches):
    assert artists(2, microbatches)[2] == 4
