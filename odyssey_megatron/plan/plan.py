"""A plan: a layout, its schedule, and the transfers that lead there, with the times and memory expected of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from odyssey_megatron.codec import to_json
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import EVERYTHING, Span
from odyssey_megatron.plan.schedule import Program, Schedule, schedule_from_text
from odyssey_megatron.plan.scheduling.programs import Programs


class Transfer(NamedTuple):
    """Worker ``source`` sends state (weights and optimizer) of ``layer`` to worker ``target``."""

    layer: int
    source: int
    target: int
    span: Span = EVERYTHING
    """The part of the layer's state that is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all members of a generation carry out. Equal plans have equal hashes."""

    def __deepcopy__(self, memo: object) -> Plan:
        """Return itself, as nothing of it changes."""
        return self

    policy: str
    """The name of the policy that made it (``policy/``), or ``initial``."""
    layout: Layout
    programs: Programs
    transfers: tuple[Transfer, ...]
    """The transfers in order; the i-th transfers of all pairs of workers may run at the same time."""
    step_s: float
    """Simulated time of one step."""
    bound_s: float
    """A lower bound on the time of one step, for any schedule of this layout."""
    transition_s: float
    peak_bytes: tuple[tuple[int, int], ...]
    """(worker, bytes) at the simulated peak."""
    keeps_messages: bool = False
    """Whether workers keep what they send until the step's end, so that a step that is interrupted can go on."""
    ahead: str = ""
    """For people: the number of eager forwards, and why there are no more; "" if none are asked for."""

    @property
    def schedule_text(self) -> str:
        """All programs in text form, so that a plan in a journal can be read."""
        return self.programs.text()

    @property
    def schedule(self) -> Schedule:
        return schedule_from_text(self.schedule_text)

    def program(self, worker: int) -> Program:
        """Return the program of ``worker``, which is empty if it has none."""
        return schedule_from_text(f"{worker}:{self.programs.of(worker)}").program(worker)

    def hash(self) -> str:
        """Return twelve hex digits of SHA-256 over the canonical JSON, which ranks compare before they act."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:12]
