"""How many samples each step has: Megatron's calculator as a function of the step alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


class Batches:
    """The batch sizes of the steps from ``first_step`` on.

    Args:
        size_after: how many samples the step has that comes behind so many of this job's.
    """

    def __init__(self, size_after: Callable[[int], int], *, first_step: int = 0):
        self._size_after, self._first_step = size_after, first_step
        self._before = [0]

    @classmethod
    def constant(cls, size: int) -> Batches:
        return cls(lambda before: size)

    @classmethod
    def of_megatron(cls, consumed: int, *, first_step: int) -> Batches:
        """As Megatron's calculator has them, of a job that begins with so many samples ``consumed``."""
        from megatron.core import num_microbatches_calculator

        calculator: Any = copy.deepcopy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)

        def size_after(before: int) -> int:
            calculator.update(consumed + before, False)
            return int(calculator.get_current_running_global_batch_size())

        return cls(size_after, first_step=first_step)

    def before(self, step: int) -> int:
        """Samples of the steps before ``step``."""
        while len(self._before) <= step - self._first_step:
            self._before.append(self._before[-1] + self._size_after(self._before[-1]))
        return self._before[step - self._first_step]

    def size(self, step: int) -> int:
        """Samples of ``step``."""
        return self.before(step + 1) - self.before(step)
