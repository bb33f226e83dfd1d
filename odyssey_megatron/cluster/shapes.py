"""What makes up a worker, by Megatron's names, and how much of a layer one rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ParallelSizes(Protocol):
    """The parallel sizes that make up a worker, by Megatron's names."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def context_parallel_size(self) -> int: ...
    @property
    def hierarchical_context_parallel_sizes(self) -> Sequence[int] | None: ...
    @property
    def expert_model_parallel_size(self) -> int: ...
    @property
    def expert_tensor_parallel_size(self) -> int | None: ...


class Each(NamedTuple):
    """How much of a layer a rank has, as multiples of what a rank of a whole cell has."""

    shards: int = 1
    """Of the weights that are cut over tensor-parallel ranks."""
    experts: int = 1
    """Of the experts, which are spread over expert-parallel ranks."""
    runs: tuple[tuple[int, int], ...] = ()
    """With an uneven gang in the job: the experts [first, last) of each of the rank's parts; ``experts`` is 1 then."""

    @property
    def cuts_experts(self) -> bool:
        """Whether the rank's experts may be in several parts."""
        return self.experts > 1 or bool(self.runs)

    def place_of(self, expert: int, of_one: int) -> tuple[int, int]:
        """Return the number, among the rank's parts, of that with its ``expert``, counted from the rank's first one,
        and that expert's number on a rank of a whole cell, which has ``of_one`` experts.
        """
        if not self.runs:
            return divmod(expert, of_one)
        number = self.runs[0][0] + expert
        part = next(at for at, (first, last) in enumerate(self.runs) if first <= number < last)
        return part, number % of_one

    def times_experts(self, of_one: int) -> float:
        """Return the number of experts that the rank has, as a multiple of ``of_one``, a whole cell's rank's."""
        return (self.runs[-1][1] - self.runs[0][0]) / of_one if self.runs else self.experts


ONE = Each()
