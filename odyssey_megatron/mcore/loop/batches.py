"""The number of samples of each step: Megatron's calculator as a function of the step alone."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from odyssey_megatron.upstream import compat


class Batches:
    """The batch sizes of the steps from ``first_step`` on: first those of ``changing``, then always ``last``.

    The steps in ``left_out`` consume their samples, but do not train on them.
    """

    def __init__(
        self, changing: Sequence[int], last: int, *, first_step: int = 0, left_out: Iterable[int] = ()
    ):
        self._changing, self._last, self._first_step = tuple(changing), last, first_step
        self._before = [*accumulate(changing, initial=0)]
        self.left_out = frozenset(left_out)

    @classmethod
    def constant(cls, size: int) -> Batches:
        return cls((), size)

    @classmethod
    def of_megatron(cls, consumed: int, *, first_step: int, left_out: Iterable[int] = ()) -> Batches:
        """The sizes by Megatron's calculator, for a job that begins after ``consumed`` samples."""
        from megatron.core import num_microbatches_calculator

        calculator: Any = copy.deepcopy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)

        def size_behind(samples: int) -> int:
            calculator.update(samples, False)
            return int(calculator.get_current_running_global_batch_size())

        settled, changing = compat.samples_until_batches_are_alike(calculator), list[int]()
        while consumed < settled:
            changing.append(size_behind(consumed))
            consumed += changing[-1]
        return cls(changing, size_behind(consumed), first_step=first_step, left_out=left_out)

    @property
    def sizes(self) -> list[int]:
        """All sizes that occur, in ascending order."""
        return sorted({*self._changing, self._last})

    @property
    def largest(self) -> int:
        """The number of samples of the largest step."""
        return self.sizes[-1]

    def before(self, step: int) -> int:
        """The number of samples of all steps before ``step``."""
        done, changed = step - self._first_step, len(self._changing)
        return self._before[min(done, changed)] + max(0, done - changed) * self._last

    def size(self, step: int) -> int:
        """The number of samples of ``step``."""
        return self.before(step + 1) - self.before(step)

    def trained_before(self, step: int) -> Counter[int]:
        """Size -> the number of steps before ``step`` that have this size, and train."""
        done = step - self._first_step
        found = Counter(self._changing[:done])
        found[self._last] += max(0, done - len(self._changing))
        found.subtract(self.size(one) for one in self.left_out if self._first_step <= one < step)
        return found

    def operations(self, args: Any, first: int, end: int) -> float:
        """The floating point operations of the steps from ``first`` to before ``end``, as Megatron counts them."""
        from megatron.training import training

        trained = self.trained_before(end)
        trained.subtract(self.trained_before(first))
        return float(
            sum(count * training.num_floating_point_operations(args, size) for size, count in trained.items())
        )
