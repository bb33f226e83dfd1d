"""A plan: layout + schedule + the transfers that lead there, with what is expected of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from odyssey_megatron.codec import to_json
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.programs import Programs
from odyssey_megatron.plan.schedule import Program, Schedule, schedule_from_text
from odyssey_megatron.plan.slices import EVERYTHING, Span


class Transfer(NamedTuple):
    """``source`` sends the state (weights, optimizer) of ``layer`` to ``target``."""

    layer: int
    source: int
    target: int
    span: Span = EVERYTHING
    """What of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all survivors carry out. Equal plans have equal hashes."""

    policy: str
    """Its name (``policy/``), or ``initial``."""
    layout: Layout
    programs: Programs
    transfers: tuple[Transfer, ...]
    """In order; the i-th transfers of all pairs may run at the same time."""
    step_s: float
    """Simulated time of one step."""
    bound_s: float
    """No schedule of this layout can be faster."""
    transition_s: float
    peak_bytes: tuple[tuple[int, int], ...]
    """(worker, bytes) at the simulated peak."""
    ahead: str = ""
    """How many forwards are run ahead, and what keeps the others from it; "" where that is not asked for."""

    @property
    def schedule_text(self) -> str:
        """All programs in text form, so that a plan in a journal can be read."""
        return self.programs.text()

    @property
    def schedule(self) -> Schedule:
        return schedule_from_text(self.schedule_text)

    def program(self, worker: int) -> Program:
        """Of ``worker`` alone. Empty if it has none."""
        return schedule_from_text(f"{worker}:{self.programs.of(worker)}").program(worker)

    def hash(self) -> str:
        """Twelve hex digits of SHA-256 over the canonical JSON: what survivors compare before acting."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:12]
