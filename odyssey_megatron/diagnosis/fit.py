"""Fitting what each piece of work costs on a healthy worker, and how fast each worker is.

The model is ``time = cost(piece) / speed(worker)``. The cost of a piece is ``alpha * tokens + beta * sum of squared
sequence lengths`` (ResiHP, arXiv 2605.06374, equation 1); a worker's speed applies to all of its work. So a slow worker
does not make its layers look expensive, as its peers compute them, too; and expensive layers do not make a worker look
slow. All fits are by medians.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from odyssey_megatron.diagnosis.timings import Floats, TimedWork, Timings, medians

_ROUNDS = 4
"""Number of rounds of fitting costs and speeds in turn. The second changes little, and the fourth nothing visible."""
_HUBER = 0.03
"""Relative residuals above this count by their size, not by their square (Huber's loss)."""


@dataclass(frozen=True, eq=False)
class Fit:
    """The model of a window of steps."""

    costs: dict[TimedWork, tuple[float, float]]
    """Piece -> (alpha, beta): seconds per token, and per squared length."""
    speeds: dict[int, float]
    """Worker -> its speed over the whole window; 1.0 is healthy."""
    log_ratio: Floats
    """For each row, the log of its time over its cost on a healthy worker."""
    alone: frozenset[TimedWork]
    """Pieces that only one worker has computed: if it is slow they look expensive."""


def fit(
    timings: Timings,
    known: Mapping[TimedWork, tuple[float, float]] | None = None,
    slow: Collection[int] = (),
) -> Fit:
    """Fit costs and speeds in turn.

    A healthy worker is taken to be as fast as the lower median of those that computed the same piece: nothing makes a
    worker faster than healthy, so that of two the faster one says what the piece costs. For a piece that only one
    worker has computed, it is the lower quartile of the window's steps.

    Args:
        known: costs of pieces that are not fitted.
        slow: workers that are known to be slow. They do not count where others have computed the same: if two of three
            are slow, half a window later the median would be theirs.
    """
    known = known or {}
    workers, is_slow = len(timings.workers), np.isin(timings.workers, [*slow])
    slowness = np.zeros(workers)  # log
    alpha, beta = np.zeros(len(timings.pieces)), np.zeros(len(timings.pieces))
    alone = np.zeros(len(timings.pieces), bool)
    ratio = np.zeros(len(timings))
    for _ in range(_ROUNDS):
        healthy_s = timings.seconds * np.exp(-slowness[timings.worker])
        for index, piece in enumerate(timings.pieces):
            rows = timings.piece == index
            holders = np.unique(timings.worker[rows])
            alone[index] = len(holders) == 1
            alpha[index], beta[index] = cost(healthy_s[rows], timings.tokens[rows], timings.squares[rows])
            if piece in known:
                alpha[index], beta[index] = known[piece]
            cost_s = alpha[index] * timings.tokens[rows] + beta[index] * timings.squares[rows]
            ratio[rows] = np.log(timings.seconds[rows] / cost_s)
            if piece in known:
                continue
            if alone[index]:
                by_step = medians(ratio[rows], timings.step[rows])[1]
                level = float(np.quantile(by_step, 0.25))
            else:
                who, each = medians(ratio[rows], timings.worker[rows])
                by_worker = np.sort(each if is_slow[who].all() else each[~is_slow[who]])
                level = float(by_worker[(len(by_worker) - 1) // 2])
            ratio[rows] -= level
            alpha[index] *= np.exp(level)
            beta[index] *= np.exp(level)
        cost_s = alpha[timings.piece] * timings.tokens + beta[timings.piece] * timings.squares
        slowness = medians(ratio, timings.worker, cost_s)[1]
    return Fit(
        costs={p: (float(alpha[i]), float(beta[i])) for i, p in enumerate(timings.pieces)},
        speeds={w: float(np.exp(-slowness[i])) for i, w in enumerate(timings.workers)},
        log_ratio=ratio,
        alone=frozenset(p for i, p in enumerate(timings.pieces) if alone[i]),
    )


def cost(seconds: Floats, tokens: Floats, squares: Floats) -> tuple[float, float]:
    """Return (alpha, beta) with the least relative error under Huber's loss; neither is negative."""
    level = float(np.median(seconds / tokens))
    per_token = squares / tokens
    if np.ptp(per_token) <= 1e-9 * max(1.0, float(per_token.max())):
        return level, 0.0
    rows = np.stack([tokens / seconds, squares / seconds], axis=1)
    scale = np.abs(rows).max(axis=0)
    rows = rows / scale
    weights = np.ones(len(rows))
    found = np.zeros(2)
    for _ in range(8):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(rows * root[:, None], root, rcond=None)[0]
        if found[1] < 0:
            return level, 0.0
        if found[0] < 0:
            return 0.0, float(np.median(seconds / squares))
        off = np.abs(rows @ found - 1)
        weights = _HUBER / np.maximum(off, _HUBER)
    return float(found[0] / scale[0]), float(found[1] / scale[1])
