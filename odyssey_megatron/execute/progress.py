"""How far a worker is with a step: what it has done, and what it has made for others."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch

from odyssey_megatron.plan.resume import BEGINS, REACHES, Visit
from odyssey_megatron.plan.schedule import Instr, Op

MessageKey = tuple[Op, int, int]
"""(the send's op, microbatch, boundary)."""


class Progress:
    """One attempt at a step, over as many generations as it takes.

    Args:
        keeps: results stay until the step's end, so that they can be sent once more to whoever takes over for a dead
            worker; else until they are sent.
    """

    def __init__(self, num_microbatches: int, num_layers: int, *, keeps: bool):
        self.table = torch.zeros(num_microbatches, num_layers, dtype=torch.uint8)
        """See ``plan/resume.py``: a failure costs the survivors nothing of it."""
        self.results: dict[MessageKey, torch.Tensor] = {}
        """The activations and gradients that leave a visit."""
        self.sums: dict[MessageKey, list[torch.Tensor]] = {}
        """Of each result numbers that are finite if all of it is; nobody looks at them unless the step's numbers are
        not (``execute/suspects.py``). For ``REDUCE_GRAD`` of this worker's own gradients of the block at that edge.
        """
        self.ahead: dict[Visit, torch.Tensor] = {}
        """What leaves the visits of other workers that this one has run ahead."""
        self.whole = True
        """The gradients are exactly what the table says: nothing was cut off half-way, and nothing reduced yet."""
        self.keeps = keeps

    def leave(self, op: Op, microbatch: int, edge: int, tensor: torch.Tensor) -> None:
        """Notes a result. An alias, since Megatron takes the storage away from its output tensors."""
        self.results[op, microbatch, edge] = tensor.detach()
        self.add_up(op, microbatch, edge, [tensor])

    def add_up(self, op: Op, microbatch: int, edge: int, tensors: Sequence[torch.Tensor]) -> None:
        """Notes the sum of a result. Nothing waits for a device to have it."""
        self.sums[op, microbatch, edge] = [one.detach().sum() for one in tensors]

    def take(self, op: Op, microbatch: int, edge: int) -> torch.Tensor:
        """A result that is sent or used now."""
        key = (op, microbatch, edge)
        return self.results[key] if self.keeps else self.results.pop(key)

    def reached(self, instr: Instr, op: Op) -> None:
        """``op`` has run for the visit of ``instr``."""
        row = self.table[instr.microbatch]
        row[instr.first : instr.last] = REACHES[op]
        row[instr.first] += BEGINS

    def take_up(self, visits: Collection[Visit]) -> None:
        """Of what has been run ahead ``visits`` are this worker's own from now on; the rest goes."""
        for microbatch, first, last in visits:
            instr = Instr(Op.FORWARD, microbatch, first, last)
            self.reached(instr, Op.FORWARD)
            self.leave(Op.SEND_FORWARD, microbatch, last, self.ahead[microbatch, first, last])
        self.ahead.clear()

    def give_up(self) -> None:
        """Nothing of it can be gone on with: whatever comes, the step is done again."""
        self.whole = False
        self.results.clear()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """The body adds to gradients: if it is cut off, nobody knows what it has added."""
        before, self.whole = self.whole, False
        yield
        self.whole = before
