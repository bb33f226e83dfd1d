"""How long a slowness will last."""

from __future__ import annotations

from collections.abc import Sequence

COMPUTE_S, LINK_S = 600.0, 1440.0
"""The expected time before any case has been seen: slow compute lasts ten minutes, slow communication 24. Source:
Greyhound (USENIX ATC 2025).
"""
_WEIGHT = 2.0
"""The weight of that prior, as the shape of a Gamma distribution; each case seen counts 1."""


def remaining_s(age_s: float, ended_s: Sequence[float] = (), mean_s: float = COMPUTE_S) -> float:
    """Return the expected time until a slowness is over.

    Durations are taken as exponential, with a rate that has a Gamma prior of shape ``_WEIGHT``. So they have a heavy
    tail: the longer a slowness has lasted, the longer it will.

    Args:
        age_s: the time that it has lasted.
        ended_s: the durations of earlier ones in the same job.
        mean_s: the mean duration in other jobs.
    """
    return ((_WEIGHT - 1) * mean_s + sum(ended_s) + age_s) / (_WEIGHT + len(ended_s) - 1)
