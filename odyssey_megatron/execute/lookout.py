"""What a rank looks out for on its way through a generation: that it has ended, and faults that are to be injected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from odyssey_megatron.errors import Superseded
from odyssey_megatron.execute.chronicle import Chronicle
from odyssey_megatron.execute.parts import FaultPoint, Member
from odyssey_megatron.execute.position import Position


class Lookout:
    """Of one rank."""

    def __init__(self, member: Member, fault_point: FaultPoint, position: Position, chronicle: Chronicle):
        self._member, self._fault_point = member, fault_point
        self._position, self._chronicle = position, chronicle
        self.generation = 0
        """The number of the one that this rank is in; 0: of none yet."""
        self._evaluating = False

    def check(self, point: str, microbatch: int = -1) -> None:
        """Before every instruction, of ``microbatch``, and before whatever else may be cut short.

        Args:
            point: where faults can be injected; "": nowhere.

        Raises:
            Superseded: a newer generation exists.
        """
        if self._member.look(self.generation):
            raise Superseded(f"generation {self.generation} has ended")
        self._chronicle.trains(self._position.committed)
        if point:
            self.fault("evaluate" if self._evaluating else point, microbatch)

    def fault(self, point: str, microbatch: int = -1, *, step: int | None = None) -> None:
        """A fault that was asked for happens here; ``step``: by default the next to be committed."""
        step = self._position.committed if step is None else step
        self._fault_point(point, step=step, generation=self.generation, microbatch=microbatch)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """What the body computes is an evaluation."""
        self._evaluating = True
        try:
            yield
        finally:
            self._evaluating = False
