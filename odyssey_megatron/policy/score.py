"""The objective: tokens expected to the horizon."""

from __future__ import annotations

import math

from odyssey_megatron.cluster.state import ClusterState

_PRIOR_FAILURES = 1.0
"""Weight of the configured mean time between failures, in failures seen."""


def mean_time_between_failures_s(state: ClusterState, mtbf_s: float, now_s: float) -> float:
    """Time between failures, by the rate of them that is to be expected: (observed time + b0) / (failures + a0).

    Exponential gaps, whose rate has a Gamma prior of shape a0 = 1 and rate b0 = ``mtbf_s``: this is the inverse of the
    rate's posterior mean (the time's own is longer: one failure less below the line).
    Deaths at one moment (a node, a switch) count as one failure.
    """
    moments = len({round(t, 1) for t in state.failure_times_s})
    observed_s = max(0.0, now_s - state.started_s)
    return (observed_s + mtbf_s * _PRIOR_FAILURES) / (moments + _PRIOR_FAILURES)


def expected_tokens(
    *,
    tokens_per_step: int,
    step_s: float,
    transition_s: float,
    mtbf_s: float,
    horizon_s: float,
    fatal_share: float = 0.0,
    restart_s: float = 0.0,
    left: float = 1.0,
    pause_s: float = 0.0,
    usual_step_s: float = 1.0,
) -> float:
    """Tokens trained until the next failure or the horizon, whichever is first.

    (tokens / step_s) * E[(min(D, H) - T)+] with D exponential of mean M, T the transition, H the horizon:
    E = M (e^(-T/M) - e^(-H/M)). For H -> infinity this is (B/t) M e^(-T/M), and D fixed instead of
    exponential gives Eq. 8 of Chameleon (arXiv 2508.21613). Zero where the transition outlasts the horizon.

    ``fatal_share`` of the workers are the only holder of some layer. If the next failure hits one of them, the job
    ends, which costs :func:`next_loss_s`; otherwise it goes on after ``pause_s``, of which counts as much as fits
    before the horizon (:func:`expected_loss_s`). Both are charged to the layout that takes the risk, at
    ``usual_step_s``, which is the same for all layouts: a faster one must not pay more for the same wait.
    A layout that risks more than it can gain has a negative score.
    """
    if transition_s >= horizon_s:
        return 0.0
    useful_s = mtbf_s * (math.exp(-transition_s / mtbf_s) - math.exp(-horizon_s / mtbf_s))
    risk_s = fatal_share and next_loss_s(fatal_share, restart_s, left, mtbf_s, horizon_s)
    risk_s += (1 - fatal_share) * expected_loss_s(pause_s, mtbf_s, horizon_s) if pause_s else 0.0
    return tokens_per_step * (useful_s / step_s - risk_s / usual_step_s)


def next_loss_s(fatal_share: float, restart_s: float, left: float, mtbf_s: float, horizon_s: float) -> float:
    """What it costs on average, in seconds of training as before, that a share of losses ends the job.

    ``fatal_share`` * (P(D < H) R + (1 - L) E[(H - D - R)+]), with D exponential of mean M, the time to the next loss
    (:func:`mean_time_between_failures_s`); H the horizon; R = ``restart_s``, until the job trains again, and the work
    that is done again (:func:`restart_cost_s`); and L = ``left``, the speed of what is started then, in whole pipelines
    (``Case.left``), beside that of before: it stays until somebody adds workers, here until the horizon. E[(X - D)+] is
    X - M (1 - e^(-X/M)).
    """
    within = -math.expm1(-horizon_s / mtbf_s)
    rest_s = max(0.0, horizon_s - restart_s)
    slower_s = (1 - left) * (rest_s + mtbf_s * math.expm1(-rest_s / mtbf_s)) if left < 1 else 0.0
    return fatal_share * (within * restart_s + slower_s)


START_S = 100.0
"""Of a job of 32 GPUs, at the least: a measured start lacks what a cluster takes to give nodes again. Megatron-LM's
own start, as TrainMover (OSDI 2026) has measured it with 32."""


def restart_cost_s(
    started_after_s: float, save_steps: int, step_s: float, trained_s: float, given_s: float = 0.0
) -> float:
    """What a restart from a checkpoint costs: the start, and the steps since the checkpoint, which are lost.

    max(``started_after_s``, :data:`START_S`) + min(``trained_s``, ``save_steps`` * ``step_s`` / 2): on average half of
    what lies between two saves is lost, and all that was trained where nothing has been saved, or ever is
    (``save_steps`` 0).

    Args:
        started_after_s: measured, of this job.
        given_s: ``--odyssey-restart-s``, which is taken as it is; 0: not given.
    """
    lost_s = min(trained_s, save_steps * step_s / 2) if save_steps else trained_s
    return given_s or max(started_after_s, START_S) + lost_s


def expected_loss_s(pause_s: float, mtbf_s: float, horizon_s: float) -> float:
    """What of a pause after the next failure falls before the horizon, on average.

    With P = ``pause_s``: E[min(P, (H - D)+)] = r - M e^(-(H-r)/M) (1 - e^(-r/M)), r = min(P, H).
    """
    lost_s = min(pause_s, horizon_s)
    return lost_s - mtbf_s * math.exp(-(horizon_s - lost_s) / mtbf_s) * -math.expm1(-lost_s / mtbf_s)
