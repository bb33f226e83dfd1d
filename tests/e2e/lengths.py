"""The example's job with samples that say they are packed of sequences of unequal lengths."""

from __future__ import annotations

import runpy
import sys
from functools import partial

from odyssey_megatron.mcore import plugin
from tests.e2e.jobs import SCRIPT

LONGEST = 16
"""``--seq-length`` of the tests' jobs."""


def squared_lengths(sample: int) -> float:
    """One sequence, and the rest of the sample in sequences of a token each."""
    longest = 1 + sample * 7919 % LONGEST
    return float(longest**2 + LONGEST - longest)


if __name__ == "__main__":
    plugin.TrainingJob = partial(plugin.TrainingJob, squared_lengths=squared_lengths)  # type: ignore[assignment,misc]
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")
