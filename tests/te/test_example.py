"""Jobs of the example whose layers are Transformer Engine's lose ranks: the same numbers, to 1e-10 in float64."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import undisturbed  # noqa: F401 - a fixture
from tests.e2e.jobs import assert_equal_runs
from tests.e2e.test_shrinking import LONG, SPENT, lost, trained
from tests.e2e.test_tensor_parallel import RANKS, SEQUENCE, STAGES

pytestmark = pytest.mark.timeout(300)


def test_layers_are_transformer_engine_s(jobs, undisturbed):  # noqa: F811
    """It makes the norm before a product a part of that."""
    run = undisturbed()
    names = {name for weights in run.weights().values() for name in weights}
    assert "layer.self_attention.linear_qkv.layer_norm_weight" in {
        name.partition("parts.")[2] or name for name in names
    }


def test_killed_and_rerouted(jobs, undisturbed, name):  # noqa: F811
    shot = jobs.run(name, ranks=4, stages=2, flags="--odyssey-inject rank=3,step=2,at=backward")
    assert_equal_runs(shot, undisturbed(), kills=1)


@pytest.mark.matrix
def test_what_is_left_of_a_cell_trains_on(jobs, undisturbed, name):  # noqa: F811
    job = f"{SEQUENCE} {LONG}"
    shot = jobs.run(name, ranks=RANKS, stages=STAGES, flags=f"{job} {SPENT} {lost(3, 1)}", timeout_s=200.0)
    assert_equal_runs(shot, undisturbed(job), kills=2)
    assert trained(shot) == [[[1, 1]]]
