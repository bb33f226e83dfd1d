"""The bars of ``tests/benchmarks/policies.py`` for one dead worker; the benchmark has them all."""

import pytest

from tests.benchmarks.policies import (
    DEAD,
    LAYERS,
    SETTINGS,
    costs,
    job_of,
    one_f_one_b_s,
    profile_of,
    recover,
)
from tests.benchmarks.zero_bubble import clock, orders, zb_v


@pytest.mark.parametrize(("dp", "pp", "microbatches"), SETTINGS)
@pytest.mark.parametrize(("extra", "bar"), [(0, 1.0), (1, 1.05)])
@pytest.mark.parametrize("state_bytes", [0, 4])
def test_a_job_with_a_dead_worker_is_as_fast_as_a_healthy_one(dp, pp, microbatches, extra, bar, state_bytes):
    profile = profile_of(pp, extra, state_bytes)
    healthy_s, decision = recover(job_of(dp, pp, microbatches), profile, DEAD[1])
    assert healthy_s < one_f_one_b_s(pp, microbatches)
    assert one_f_one_b_s(pp, microbatches) / decision.plan.step_s >= bar


def test_zero_bubble_v_has_no_bubbles_at_1f1b_s_memory():
    """As its authors have it, of chunks whose three kinds of work take equally long: what the column beside ours is."""
    pytest.importorskip("torch")
    for stages, microbatches in ((4, 8), (4, 16), (8, 16)):
        layers = costs(10**9, 0)
        programs, last = orders(stages, microbatches), 2 * stages - 1
        seconds = {(kind, chunk): 1.0 for kind in "FIW" for chunk in range(2 * stages)}
        for (begins_s, ends_s), program in zip(clock(programs, seconds, 0.0, last)[0], programs, strict=True):
            assert ends_s - begins_s == len(program) == 6 * microbatches
        step_s, peak = zb_v(layers, stages, microbatches)
        assert peak == stages * LAYERS / stages, "of the first worker under 1F1B"
        assert 3 * LAYERS / stages * microbatches < step_s < one_f_one_b_s(stages, microbatches)
