"""The objective: the tokens that are expected to be trained until the next failure, less the risk of that failure."""

from __future__ import annotations

import math

from odyssey_megatron.cluster.state import ClusterState

_PRIOR_FAILURES = 1.0
"""Weight of the configured mean time between failures, in observed failures."""

NODE_SHARE = 0.2
"""The share of losses that take a whole node. Source: of the 419 failures of Llama 3's training (arXiv 2407.21783,
table 5) 32 were maintenance of a host, 42 its switch, cable or network card, and 14 its disks, power supply, chassis,
boards, processor or memory.
"""


def mean_time_between_failures_s(state: ClusterState, mtbf_s: float, now_s: float) -> float:
    """Return the expected time between failures: (observed time + b0) / (failures + a0).

    Gaps are taken to be exponential, with a Gamma prior of shape a0 = 1 and rate b0 = ``mtbf_s`` for their rate. This
    is the inverse of the rate's posterior mean; the posterior mean of the time itself is longer, as it has one failure
    less in the denominator. Deaths at one moment (a node, a switch) count as one failure.
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
    """Return the expected tokens trained until the next failure or the horizon, whichever is first.

    They are (tokens / step_s) * E[(min(D, H) - T)+] with D exponential of mean M, T the transition, H the horizon: E =
    M (e^(-T/M) - e^(-H/M)). For H -> infinity this is (B/t) M e^(-T/M), and D fixed instead of exponential gives Eq. 8
    of Chameleon (arXiv 2508.21613). Zero if the transition outlasts the horizon.

    ``fatal_share`` is the share of workers that are the only holder of some layer. If the next failure hits one of
    them, the job ends, which costs :func:`next_loss_s`. Otherwise it goes on after ``pause_s``, which counts as far as
    it is before the horizon (:func:`expected_loss_s`). Both are charged to the layout that takes the risk, at
    ``usual_step_s``, which is the same for all layouts: a faster one must not pay more for the same wait. What a job
    does after a failure that it survives counts for no layout, but a fatal one counts to the horizon: it is priced on
    the safe side. A layout that risks more than it can gain has a negative score.
    """
    if transition_s >= horizon_s:
        return 0.0
    useful_s = mtbf_s * (math.exp(-transition_s / mtbf_s) - math.exp(-horizon_s / mtbf_s))
    risk_s = fatal_share and next_loss_s(fatal_share, restart_s, left, mtbf_s, horizon_s)
    risk_s += (1 - fatal_share) * expected_loss_s(pause_s, mtbf_s, horizon_s) if pause_s else 0.0
    return tokens_per_step * (useful_s / step_s - risk_s / usual_step_s)


def next_loss_s(fatal_share: float, restart_s: float, left: float, mtbf_s: float, horizon_s: float) -> float:
    """Return the average cost, in seconds of training as before, of the risk that a loss ends the job.

    It is ``fatal_share`` * (P(D < H) R + (1 - L) E[(H - D - R)+]). D is the time to the next loss, exponential of mean
    M (:func:`mean_time_between_failures_s`), and H the horizon. R = ``restart_s`` is the time until the job trains
    again, and has done the lost work again (:func:`restart_cost_s`). L = ``left`` is the speed of what is started then,
    in whole pipelines (``Case.left``), relative to before. It stays so until somebody adds workers; here, until the
    horizon. E[(X - D)+] is X - M (1 - e^(-X/M)).
    """
    within = -math.expm1(-horizon_s / mtbf_s)
    rest_s = max(0.0, horizon_s - restart_s)
    slower_s = (1 - left) * (rest_s + mtbf_s * math.expm1(-rest_s / mtbf_s)) if left < 1 else 0.0
    return fatal_share * (within * restart_s + slower_s)


START_S = 100.0
"""The least start time of a job, here of 32 GPUs: a measured start lacks the time in which a cluster provides nodes
again. It is Megatron-LM's own start with 32 GPUs, as TrainMover (OSDI 2026) has measured it.
"""


def restart_cost_s(
    started_after_s: float, save_steps: int, step_s: float, trained_s: float, given_s: float = 0.0
) -> float:
    """Return the cost of a restart from a checkpoint: the start, and the lost steps since the checkpoint.

    It is max(``started_after_s``, :data:`START_S`) + min(``trained_s``, ``save_steps`` * ``step_s`` / 2). On average
    half of the steps between two saves is lost. All that was trained is lost if nothing has been saved, or is ever
    saved (``save_steps`` 0).

    Args:
        started_after_s: the start, as measured for this job.
        given_s: ``--odyssey-restart-s``, which is returned as it is; 0: not given.
    """
    lost_s = min(trained_s, save_steps * step_s / 2) if save_steps else trained_s
    return given_s or max(started_after_s, START_S) + lost_s


def expected_loss_s(pause_s: float, mtbf_s: float, horizon_s: float) -> float:
    """Return how much of a pause after the next failure is before the horizon, on average.

    With P = ``pause_s``: E[min(P, (H - D)+)] = r - M e^(-(H-r)/M) (1 - e^(-r/M)), r = min(P, H).
    """
    lost_s = min(pause_s, horizon_s)
    return lost_s - mtbf_s * math.exp(-(horizon_s - lost_s) / mtbf_s) * -math.expm1(-lost_s / mtbf_s)
