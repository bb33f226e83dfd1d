"""How long what is slow will stay slow."""

from __future__ import annotations

from collections.abc import Sequence

COMPUTE_S, LINK_S = 600.0, 1440.0
"""Before anything has been seen: slow compute lasts ten minutes, slow communication 24. Source: Greyhound (USENIX ATC
2025).
"""
_WEIGHT = 2.0
"""Of that, in cases seen."""


def remaining_s(age_s: float, ended_s: Sequence[float] = (), mean_s: float = COMPUTE_S) -> float:
    """Expected time until it is over, of a slowness that has lasted ``age_s``, in a job where others have lasted
    ``ended_s``; ``mean_s``: of others.

    Exponential durations whose rate has a Gamma prior of shape ``_WEIGHT``, and so a heavy tail: the longer it has
    lasted, the longer it will.
    """
    return ((_WEIGHT - 1) * mean_s + sum(ended_s) + age_s) / (_WEIGHT + len(ended_s) - 1)
