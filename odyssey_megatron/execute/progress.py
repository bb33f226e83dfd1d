"""How far a worker is with a step: what it has done, and what it has made for others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from odyssey_megatron.execute.ledger import Word
from odyssey_megatron.plan.resume import BEGINS, REACHES, Visit
from odyssey_megatron.plan.schedule import Instr, Op
from odyssey_megatron.plan.visits import BACKED

MessageKey = tuple[Op, int, int]
"""(the send's op, microbatch, boundary)."""


class _Noted(NamedTuple):
    """An instruction that a device was given, with its words."""

    instr: Instr
    op: Op
    began: torch.Tensor
    ended: torch.Tensor
    final: bool = False
    """Of a sum: what the gradients were before is not kept."""


class Progress:
    """One attempt at a step, over as many generations as it takes.

    Args:
        keeps: results stay until the step's end, so that they can be sent once more to whoever takes over for a dead
            worker; else until they are sent.
        alone: a worker is one rank. Where several compute together, what they exchange within an instruction is
            garbage once groups are aborted: gradients then are not what they were, though it began with nothing.
    """

    def __init__(self, num_microbatches: int, num_layers: int, *, keeps: bool, alone: bool = True):
        self.table = torch.zeros(num_microbatches, num_layers, dtype=torch.uint8)
        """See ``plan/resume.py``: a failure costs the survivors nothing of it. Behind :meth:`take_stock`."""
        self._noted: list[_Noted] = []
        self.words: dict[MessageKey, torch.Tensor] = {}
        """Of results."""
        self.results: dict[MessageKey, torch.Tensor] = {}
        """The activations and gradients that leave a visit."""
        self.sums: dict[MessageKey, list[torch.Tensor]] = {}
        """Of each result numbers that are finite if all of it is; nobody looks at them unless the step's numbers are
        not (``execute/suspects.py``). For ``REDUCE_GRAD`` of this worker's own gradients of the block at that edge.
        """
        self.ahead: dict[Visit, torch.Tensor] = {}
        """What leaves the visits of other workers that this one has run ahead."""
        self._whole, self._adding, self._alone = True, 0, alone
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Gradients that are sums by now, and what they were."""
        self._take: Callable[[], None] = lambda: None
        self.keeps = keeps

    @property
    def whole(self) -> bool:
        """The gradients are exactly what the table says, behind :meth:`bring_back`: nothing was cut off half-way."""
        return self._whole and not self._adding

    @whole.setter
    def whole(self, whole: bool) -> None:
        self._whole = whole

    def leave(self, op: Op, microbatch: int, edge: int, tensor: torch.Tensor, word: Word = None) -> None:
        """Notes a result. An alias, since Megatron takes the storage away from its output tensors."""
        self.results[op, microbatch, edge] = tensor.detach()
        self.add_up(op, microbatch, edge, [tensor], word)

    def add_up(
        self, op: Op, microbatch: int, edge: int, tensors: Sequence[torch.Tensor], word: Word = None
    ) -> None:
        """Notes the sum of a result, and its word. Nothing waits for a device to have it."""
        if word is not None:
            self.words[op, microbatch, edge] = word
        self.sums[op, microbatch, edge] = [one.detach().sum() for one in tensors]

    def take(self, op: Op, microbatch: int, edge: int) -> tuple[torch.Tensor, Word]:
        """A result that is sent or used now, and its word."""
        key = (op, microbatch, edge)
        return self.results[key] if self.keeps else self.results.pop(key), self.words.get(key)

    def run_ahead(self, instr: Instr, left: torch.Tensor, began: Word, ended: Word) -> None:
        """Notes a forward for another worker, and what leaves it."""
        self.ahead[instr.microbatch, instr.first, instr.last] = left
        if began is not None and ended is not None:
            self.words[Op.EAGER_FORWARD, instr.microbatch, instr.first] = began
            self._noted.append(_Noted(instr, Op.EAGER_FORWARD, began, ended))

    def reached(self, instr: Instr, op: Op, began: Word = None, ended: Word = None) -> None:
        """``op`` has run for the visit of ``instr``; or, with words, a device was given it, and they will say so."""
        if began is None or ended is None:
            self._mark(instr, REACHES[op])
        else:
            self._noted.append(_Noted(instr, op, began, ended))

    def _mark(self, instr: Instr, level: int) -> None:
        codes = self.table[instr.microbatch]
        if instr.last < len(codes) and 0 < codes[instr.last] < BEGINS:
            codes[instr.last] += BEGINS  # one visit so far: the rest of it may be less far from now on
        row = codes[instr.first : instr.last]
        if level != BACKED:
            row[:] = level
        else:  # beside an input gradient the first weight gradients of its microbatch may have run
            row[row % BEGINS < BACKED] = BACKED
        row[0] = row[0] % BEGINS + BEGINS * (level > 0)

    def summed(self, instr: Instr, word: Word, gradients: torch.Tensor, before: torch.Tensor | None) -> None:
        """``gradients`` of ``instr`` become sums over their holders now; ``before``: what they are, if that is kept."""
        if before is not None:
            self._own.append((gradients, before))
        if word is not None:
            self._noted.append(_Noted(instr, Op.REDUCE_GRAD, word, word, final=before is None))
        elif before is None:
            self.whole = False

    def hand_back(self, take: Callable[[], None]) -> None:
        """``take`` puts what the summed buffers hold where the gradients are, if those were copies: now, and once more
        behind :meth:`bring_back`.
        """
        take()
        self._take = take

    def bring_back(self) -> None:
        """This worker's own gradients, where they are sums."""
        for gradients, before in self._own:
            gradients.copy_(before)
        if self._own:
            self._take()
        self._own.clear()

    def agreed(self) -> None:
        """The sums stay."""
        self._own.clear()

    def missing(self, device: torch.device) -> torch.Tensor:
        """How many of the instructions so far have counted for nothing. The host does not wait for it."""
        if not self._noted:
            return torch.zeros((), dtype=torch.float64, device=device)
        return (1.0 - torch.stack([one.ended for one in self._noted])).sum().double()

    def take_stock(self) -> list[Visit]:
        """What the device has really done, once it has nothing left to do: the host waits for it.

        Returns:
            The visits that the model must forget, since a part of them counted for nothing: they are done anew.
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
            elif op is Op.WEIGHT_GRAD:  # it needs nothing but what its input gradient has left here
                self.whole = self.whole and began == ended and bool(self._alone or ended)
                if not any(m == visit[0] and a <= visit[1] and visit[2] <= b for m, a, b in undone):
                    self._mark(instr, REACHES[op])
            elif ended == 1.0:  # what was taken for a word may be any number, or none
                self._mark(instr, REACHES[op])
            else:  # autograd has let go of the forward, too
                self.whole = self.whole and ((began == ended and self._alone) or op is Op.FORWARD)
                self._mark(instr, 0)
                undone[visit] = None
        return list(undone)

    def take_up(self, visits: Collection[Visit]) -> None:
        """Of what has been run ahead ``visits`` are this worker's own from now on; the rest goes."""
        for microbatch, first, last in visits:
            word = self.words.get((Op.EAGER_FORWARD, microbatch, first))
            instr = Instr(Op.FORWARD, microbatch, first, last)
            self.reached(instr, Op.FORWARD)
            self.leave(Op.SEND_FORWARD, microbatch, last, self.ahead[microbatch, first, last], word)
        self.ahead.clear()

    def give_up(self) -> None:
        """Nothing of it can be gone on with: whatever comes, the step is done again."""
        self.whole = False
        self.results.clear()
        self._own.clear()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """The body adds to gradients: if it is cut off, nobody knows what it has added."""
        self._adding += 1
        yield
        self._adding -= 1
