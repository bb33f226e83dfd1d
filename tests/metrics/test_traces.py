from __future__ import annotations

import pytest

from odyssey_megatron.metrics.run import read_run
from odyssey_megatron.metrics.traces import before_and_after, whole_steps

from .synthetic_run import FIRST, MICROBATCHES, SECOND, STEPS, SWITCH


@pytest.fixture(scope="module")
def run(runs):
    return read_run(runs["shot_at"])


def test_the_pictures_show_the_step_before_and_the_last_step_of_the_new_generation(run):
    before, after = before_and_after(run.recoveries[0], whole_steps(run.traced, run.steps))
    assert (before.step, before.generation) == (FIRST - 1, 1)
    assert (after.step, after.generation) == (SWITCH - 1, 2)
    before, after = before_and_after(run.recoveries[2], whole_steps(run.traced, run.steps))
    assert (before.step, after.step, after.generation) == (SECOND - 1, STEPS - 1, 6)


def test_a_superseded_generation_has_no_after(run):
    assert before_and_after(run.recoveries[1], whole_steps(run.traced, run.steps))[1] is None


def test_boxes_are_the_instructions(run):
    executed = run.traced[0]
    kinds = [box.kind for box in executed.boxes if box.rank == 0]
    assert {kind: kinds.count(kind) for kind in ("F", "I", "W", "REDUCE_GRAD", "STEP")} == {
        "F": MICROBATCHES // 2, "I": MICROBATCHES // 2, "W": MICROBATCHES // 2, "REDUCE_GRAD": 1, "STEP": 1,
    }  # fmt: skip
    assert min(box.start_s for box in executed.boxes) == 0.0
    assert executed.layers_of(0) == ((0, 3),)


def test_rows_go_pipeline_by_pipeline(run):
    assert run.traced[0].ranks == (0, 2, 4, 6, 1, 3, 5, 7)
    assert run.traced[-1].ranks == (1, 2, 6, 4, 7)
