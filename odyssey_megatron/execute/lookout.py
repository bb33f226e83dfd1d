"""The checks of a rank on its way through a generation: has it ended, and is a fault to be injected?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from odyssey_megatron.errors import Superseded
from odyssey_megatron.execute.chronicle import Chronicle
from odyssey_megatron.execute.parts import FaultPoint, Member
from odyssey_megatron.execute.position import Position


class Lookout:
    """The checks of one rank."""

    def __init__(self, member: Member, fault_point: FaultPoint, position: Position, chronicle: Chronicle):
        self._member, self._fault_point = member, fault_point
        self._position, self._chronicle = position, chronicle
        self.generation = 0
        """The number of the generation that this rank is in; 0 before the first."""
        self._evaluating = False

    def check(self, point: str, microbatch: int = -1) -> None:
        """Check before every instruction, of ``microbatch``, and before whatever else may be cut short.

        Args:
            point: The point at which a fault can be injected; "": none.

        Raises:
            Superseded: A newer generation exists.
        """
        if self._member.look(self.generation):
            raise Superseded(f"generation {self.generation} has ended")
        self._chronicle.trains(self._position.committed)
        if point:
            self.fault("evaluate" if self._evaluating else point, microbatch)

    def fault(self, point: str, microbatch: int = -1, *, step: int | None = None) -> None:
        """Inject a fault here, if one was asked for; ``step``: by default the next one to be committed."""
        step = self._position.committed if step is None else step
        self._fault_point(point, step=step, generation=self.generation, microbatch=microbatch)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Mark that the body computes an evaluation."""
        self._evaluating = True
        try:
            yield
        finally:
            self._evaluating = False
