import math

import pytest

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.state import apply, initial_state
from odyssey_megatron.policy.score import expected_tokens, mean_time_between_failures_s


def tokens(step_s, transition_s, mtbf_s, horizon_s=math.inf):
    return expected_tokens(
        tokens_per_step=100,
        step_s=step_s,
        transition_s=transition_s,
        mtbf_s=mtbf_s,
        horizon_s=horizon_s,
    )


def test_without_horizon_it_is_the_memoryless_form():
    assert tokens(2.0, 5.0, 50.0) == pytest.approx(100 / 2.0 * 50.0 * math.exp(-5.0 / 50.0))


def test_rare_failures_give_the_horizon():
    assert tokens(2.0, 10.0, 1e9, 1000.0) == pytest.approx(100 / 2.0 * 990.0, rel=1e-5)


def test_a_transition_that_never_pays():
    assert tokens(1.0, 10.0, 1e9, 10.0) == 0.0
    # Fast but costly loses against slow but free when failures come often, and wins when they are rare.
    assert tokens(1.0, 60.0, 50.0) < tokens(2.0, 0.0, 50.0)
    assert tokens(1.0, 60.0, 5000.0) > tokens(2.0, 0.0, 5000.0)


def test_posterior_moves_from_prior_to_what_is_seen():
    state = initial_state(nodes=(0, 0, 1, 1), started_s=100.0)
    assert mean_time_between_failures_s(state, 3600.0, 100.0) == 3600.0
    assert mean_time_between_failures_s(state, 3600.0, 3700.0) == 7200.0
    for rank, t_s in ((0, 200.0), (1, 200.01), (2, 400.0)):
        state = apply(state, RankDied(rank=rank, code=-9, cause="killed", t_s=t_s))
    assert mean_time_between_failures_s(state, 3600.0, 400.0) == (300.0 + 3600.0) / 3


def test_the_risk_of_a_lone_holder_is_charged():
    """By simulation: D exponential of mean 100 s, R = 30 s, H = 200 s, a quarter of the workers hold alone, and what is
    started then is a fifth slower.
    """
    mean, restart, horizon, share = 100.0, 30.0, 200.0, 0.25
    slices = 20_000
    times = [horizon * (i + 0.5) / slices for i in range(slices)]
    risk = (
        sum(math.exp(-t / mean) / mean * (restart + 0.2 * max(0.0, horizon - restart - t)) for t in times)
        * horizon
        / slices
    )
    safe = tokens(2.0, 0.0, mean, horizon)
    risky = expected_tokens(
        tokens_per_step=100,
        step_s=2.0,
        transition_s=0.0,
        mtbf_s=mean,
        horizon_s=horizon,
        fatal_share=share,
        restart_s=restart,
        left=0.8,
        usual_step_s=4.0,
    )
    assert safe - risky == pytest.approx(100 / 4.0 * share * risk, rel=1e-3)
