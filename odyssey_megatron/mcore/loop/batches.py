"""How many samples each step has: Megatron's calculator as a function of the step alone."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

_BEHIND_ALL = 2**62
"""Samples after which no batch size grows any more."""


class Batches:
    """The batch sizes of the steps from ``first_step`` on: first those of ``growing``, and from then on ``full``."""

    def __init__(self, growing: Sequence[int], full: int, *, first_step: int = 0):
        self._growing, self._full, self._first_step = tuple(growing), full, first_step
        self._before = [*accumulate(growing, initial=0)]

    @classmethod
    def constant(cls, size: int) -> Batches:
        return cls((), size)

    @classmethod
    def of_megatron(cls, consumed: int, *, first_step: int) -> Batches:
        """As Megatron's calculator has them, of a job that begins with so many samples ``consumed``."""
        from megatron.core import num_microbatches_calculator

        calculator: Any = copy.deepcopy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)

        def size_behind(samples: int) -> int:
            calculator.update(samples, False)
            return int(calculator.get_current_running_global_batch_size())

        full, growing = size_behind(_BEHIND_ALL), list[int]()
        while (size := size_behind(consumed + sum(growing))) < full:
            growing.append(size)
        return cls(growing, full, first_step=first_step)

    def before(self, step: int) -> int:
        """Samples of the steps before ``step``."""
        done, grown = step - self._first_step, len(self._growing)
        return self._before[min(done, grown)] + max(0, done - grown) * self._full

    def size(self, step: int) -> int:
        """Samples of ``step``."""
        return self.before(step + 1) - self.before(step)

    def sizes_before(self, step: int) -> Counter[int]:
        """Size -> how many of the steps before ``step`` have it."""
        done = step - self._first_step
        found = Counter(self._growing[:done])
        found[self._full] += max(0, done - len(self._growing))
        return found
