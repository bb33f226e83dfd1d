"""How far a worker is with a step: what it has done, and what it has made for others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from odyssey_megatron.execute.ledger import Word
from odyssey_megatron.plan.schedule import Instr, Op
from odyssey_megatron.plan.scheduling.resume import BEGINS, REACHES, Visit
from odyssey_megatron.plan.scheduling.visits import BACKED

MessageKey = tuple[Op, int, int]
"""The key of a message: (op of the send, microbatch, boundary)."""


class _Noted(NamedTuple):
    """An instruction that a device was given, with the words at its beginning and at its end."""

    instr: Instr
    op: Op
    began: torch.Tensor
    ended: torch.Tensor
    final: bool = False
    """For a sum: the gradients that it replaces are not kept."""


class Progress:
    """One attempt at a step, over as many generations as it takes.

    Args:
        keeps: Results stay until the step's end, so that they can be sent once more to a worker that takes
            over for a dead one. Otherwise they stay until they are sent.
        alone: A worker is one rank. Where several ranks compute together, what they exchange within an
            instruction is garbage once groups are aborted. It may then change gradients, even in an
            instruction that began with zeros.
    """

    def __init__(self, num_microbatches: int, num_layers: int, *, keeps: bool, alone: bool = True):
        self.table = torch.zeros(num_microbatches, num_layers, dtype=torch.uint8)
        """How far each visit is, in the code of ``plan/scheduling/resume.py``; [microbatches, layers]. With words, it
        is only up to date after :meth:`take_stock`.
        """
        self._noted: list[_Noted] = []
        self.words: dict[MessageKey, torch.Tensor] = {}
        """The words of results and of eager forwards."""
        self.results: dict[MessageKey, torch.Tensor] = {}
        """The activations and gradients that leave a visit."""
        self.sums: dict[MessageKey, list[torch.Tensor]] = {}
        """For each result, numbers that are finite if all of it is; for ``REDUCE_GRAD``, of this worker's own
        gradients of the block at that edge. Nobody looks at them unless the step's numbers are not finite
        (``execute/suspects.py``).
        """
        self.ahead: dict[Visit, torch.Tensor] = {}
        """The outputs of the eager forwards that this worker has run, by visit."""
        self._whole, self._adding, self._alone = True, 0, alone
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of a gradient that has become a sum, and a copy of what it was before."""
        self._take: Callable[[], None] = lambda: None
        self.keeps = keeps

    @property
    def whole(self) -> bool:
        """Whether nothing was cut off half-way: after :meth:`bring_back` the gradients are exactly what the
        table says.
        """
        return self._whole and not self._adding

    @whole.setter
    def whole(self, whole: bool) -> None:
        self._whole = whole

    def rows(self) -> dict[int, list[int]]:
        """Return the rows of the table of the microbatches that have been begun."""
        begun = self.table.any(dim=1).nonzero().flatten()
        return dict(zip(begun.tolist(), self.table[begun].tolist(), strict=True))

    def leave(self, op: Op, microbatch: int, edge: int, tensor: torch.Tensor, word: Word = None) -> None:
        """Note a result, [s, b, h]. An alias is kept, since Megatron frees the storage of its output tensors."""
        self.results[op, microbatch, edge] = tensor.detach()
        self.add_up(op, microbatch, edge, [tensor], word)

    def add_up(
        self, op: Op, microbatch: int, edge: int, tensors: Sequence[torch.Tensor], word: Word = None
    ) -> None:
        """Note the word of a result, and the sum of each of its ``tensors``, 0-D. Nothing waits for the device to have
        computed it.
        """
        if word is not None:
            self.words[op, microbatch, edge] = word
        self.sums[op, microbatch, edge] = [one.detach().sum() for one in tensors]

    def take(self, op: Op, microbatch: int, edge: int) -> tuple[torch.Tensor, Word]:
        """Return a result that is sent or used now, [s, b, h], and its word."""
        key = (op, microbatch, edge)
        return self.results[key] if self.keeps else self.results.pop(key), self.words.get(key)

    def run_ahead(self, instr: Instr, left: torch.Tensor, began: Word, ended: Word) -> None:
        """Note an eager forward, and its output ``left``, [s, b, h]."""
        self.ahead[instr.microbatch, instr.first, instr.last] = left
        if began is not None and ended is not None:
            self.words[Op.EAGER_FORWARD, instr.microbatch, instr.first] = began
            self._noted.append(_Noted(instr, Op.EAGER_FORWARD, began, ended))

    def reached(self, instr: Instr, op: Op, began: Word = None, ended: Word = None) -> None:
        """Note that ``op`` has run for the visit of ``instr``; with words, that a device was given it, and
        they will tell.
        """
        if began is None or ended is None:
            self._mark(instr, REACHES[op])
        else:
            self._noted.append(_Noted(instr, op, began, ended))

    def _mark(self, instr: Instr, level: int) -> None:
        codes = self.table[instr.microbatch]
        if instr.last < len(codes) and 0 < codes[instr.last] < BEGINS:
            # What was one visit may be two from now on, as its rest may be less far.
            codes[instr.last] += BEGINS
        row = codes[instr.first : instr.last]
        if level != BACKED:
            row[:] = level
        else:
            # Beside an input gradient, the first weight gradients of its microbatch may have run.
            row[row % BEGINS < BACKED] = BACKED
        row[0] = row[0] % BEGINS + BEGINS * (level > 0)

    def summed(self, instr: Instr, word: Word, gradients: torch.Tensor, before: torch.Tensor | None) -> None:
        """Note that ``gradients`` of ``instr``, 1-D, become sums over their holders now; ``before`` is a copy of
        them, if kept.
        """
        if before is not None:
            self._own.append((gradients, before))
        if word is not None:
            self._noted.append(_Noted(instr, Op.REDUCE_GRAD, word, word, final=before is None))
        elif before is None:
            self.whole = False

    def hand_back(self, take: Callable[[], None]) -> None:
        """Call ``take``, which puts summed buffers into the gradients, where those buffers are copies of them.

        It is called again in :meth:`bring_back`.
        """
        take()
        self._take = take

    def bring_back(self) -> None:
        """Restore this worker's own gradients where they have become sums."""
        for gradients, before in self._own:
            gradients.copy_(before)
        if self._own:
            self._take()
        self._own.clear()

    def agreed(self) -> None:
        """Keep the sums for good."""
        self._own.clear()

    def missing(self, device: torch.device) -> torch.Tensor:
        """Return the number of instructions so far that have counted for nothing: 0-D, float64, on ``device``. The host
        does not wait for it.
        """
        if not self._noted:
            return torch.zeros((), dtype=torch.float64, device=device)
        return (1.0 - torch.stack([one.ended for one in self._noted])).sum().double()

    def take_stock(self) -> list[Visit]:
        """Find out what the device has really done, once it has nothing left to do. The host waits for it.

        Returns:
            The visits that the model must forget, since a part of them counted for nothing. They are done
            anew.
        """
        noted, self._noted = self._noted, []
        if not noted:
            return []
        words = torch.stack([torch.stack([one.began, one.ended]) for one in noted]).tolist()
        undone: dict[Visit, None] = {}
        for (instr, op, _, _, final), (began, ended) in zip(noted, words, strict=True):
            visit = (instr.microbatch, instr.first, instr.last)
            if op is Op.REDUCE_GRAD:
                self.whole = self.whole and not (final and ended)
            elif op is Op.EAGER_FORWARD:
                if ended != 1.0:
                    self.ahead.pop(visit, None)
                    undone[visit] = None
            # A weight gradient needs nothing but what its input gradient has left on this worker.
            elif op is Op.WEIGHT_GRAD:
                self.whole = self.whole and began == ended and bool(self._alone or ended)
                if not any(m == visit[0] and a <= visit[1] and visit[2] <= b for m, a, b in undone):
                    self._mark(instr, REACHES[op])
            # Compared with 1.0, as an aborted message may leave any number, or NaN, in place of a word.
            elif ended == 1.0:
                self._mark(instr, REACHES[op])
            else:
                # The visit is done anew, its forward included, as autograd has freed what that kept.
                self.whole = self.whole and ((began == ended and self._alone) or op is Op.FORWARD)
                self._mark(instr, 0)
                undone[visit] = None
        return list(undone)

    def take_up(self, visits: Collection[Visit]) -> None:
        """Make the eager forwards of ``visits`` this worker's own, and drop all others."""
        for microbatch, first, last in visits:
            word = self.words.get((Op.EAGER_FORWARD, microbatch, first))
            instr = Instr(Op.FORWARD, microbatch, first, last)
            self.reached(instr, Op.FORWARD)
            self.leave(Op.SEND_FORWARD, microbatch, last, self.ahead[microbatch, first, last], word)
        self.ahead.clear()

    def give_up(self) -> None:
        """Drop what has been done, as nothing of it can be used: whatever comes, the step is done again."""
        self.whole = False
        self.results.clear()
        self._own.clear()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Mark that the body adds to gradients: if it is cut off, nobody knows what it has added."""
        self._adding += 1
        yield
        self._adding -= 1
