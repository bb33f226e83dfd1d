"""The bars of ``tests/benchmarks/policies.py`` for one dead worker; the benchmark has them all."""

import pytest

from tests.benchmarks.policies import DEAD, SETTINGS, job_of, one_f_one_b_s, profile_of, recover


@pytest.mark.parametrize(("dp", "pp", "microbatches"), SETTINGS)
@pytest.mark.parametrize(("extra", "bar"), [(0, 1.0), (1, 1.05)])
@pytest.mark.parametrize("state_bytes", [0, 4])
def test_a_job_with_a_dead_worker_is_as_fast_as_a_healthy_one(dp, pp, microbatches, extra, bar, state_bytes):
    profile = profile_of(pp, extra, state_bytes)
    healthy_s, decision = recover(job_of(dp, pp, microbatches), profile, DEAD[1])
    assert healthy_s < one_f_one_b_s(pp, microbatches)
    assert one_f_one_b_s(pp, microbatches) / decision.plan.step_s >= bar
