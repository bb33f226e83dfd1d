"""The interpreter: a handler table and a loop. It carries out one worker's program and has no opinions."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Protocol

import torch
import torch.distributed as dist

from odyssey_megatron.errors import ScheduleInvalid, Superseded
from odyssey_megatron.execute.channels import Channels, Pending
from odyssey_megatron.execute.ledger import Ledger, Word, only_if
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.execute.reduction import Reduction, Summed
from odyssey_megatron.execute.scatter import Slices
from odyssey_megatron.execute.timing import Trace
from odyssey_megatron.plan.groups import Holders
from odyssey_megatron.plan.resume import Visit
from odyssey_megatron.plan.schedule import Instr, Op

Passed = Callable[[int], None]
"""Called with a layer."""

Needs = Callable[[int], None] | None
"""Called with a layer before it computes; returns when its weights are here. None: all are."""

FORWARD_ONLY = frozenset({Op.FORWARD, Op.SEND_FORWARD, Op.RECV_FORWARD})
"""What is left of a program in an evaluation. Taking the rest away cannot deadlock: it only removes waits."""


class Compute(Protocol):
    """The model, as the interpreter sees it. Activations and their gradients are [s, b, h]."""

    def forward(
        self,
        microbatch: int,
        first: int,
        last: int,
        activation: torch.Tensor | None,
        *,
        ahead: bool = False,
        needs: Needs = None,
    ) -> torch.Tensor:
        """Layers ``[first, last)``; ``activation`` is None where ``first`` is the embedding.

        ``ahead``: for another worker. It counts for nothing, losses included, before :meth:`adopt`.
        """
        ...

    def adopt(self, visits: Collection[Visit]) -> None:
        """Of the forwards run ahead these are this worker's own from now on, and count; the others are let go of."""
        ...

    def kept(self, microbatch: int, first: int, last: int) -> None:
        """The output of that forward has an alias from now on; it need not keep its memory itself."""
        ...

    def input_grad(
        self,
        microbatch: int,
        first: int,
        last: int,
        grad: torch.Tensor | None,
        *,
        word: Word = None,
        passed: Passed | None = None,
    ) -> torch.Tensor | None:
        """Gradient of the input; ``grad`` (of the output) is None where ``last`` is behind the head.

        Multiplied by ``word`` is what the model adds to gradients by itself: its loss, those of routers. ``passed`` may
        be called on the way, ever lower down: from that layer on all that it adds to gradients has been added, and
        weight gradients can run.
        """
        ...

    def weight_grad(self, microbatch: int, first: int, last: int) -> None:
        """Adds the weight gradients of a microbatch whose input gradient has run, those of these layers."""
        ...

    def undo(self, visits: Collection[Visit]) -> None:
        """Forgets these forwards, and what has been counted of them: they are done anew, here or elsewhere."""
        ...

    def gradients(self, first: int, last: int, part: int) -> Sequence[torch.Tensor]:
        """1-D, those of layers ``[first, last)`` of one block, to be summed over its holders: of ``part``, one of the
        rank's ``Cell.held_shards``, as the ranks of whole cells have them, in place; in smaller cells in a copy.
        """
        ...

    def expert_gradients(self, first: int, last: int, part: int) -> Sequence[torch.Tensor]:
        """Of experts that are spread over ranks, which only those sum who have the same ones: of one of the parts that
        this rank has of them.
        """
        ...

    def slices(self, first: int, last: int, part: int) -> Sequence[Slices]:
        """Where not all who hold these layers need all sums, who needs what of :meth:`gradients`."""
        ...

    def expert_slices(self, first: int, last: int, part: int) -> Sequence[Slices]:
        """The same of :meth:`expert_gradients`."""
        ...

    @property
    def share(self) -> float:
        """What gradients are multiplied with before they are summed; 1.0: nothing."""
        ...

    def partial_gradients(self, first: int, last: int, part: int) -> Sequence[torch.Tensor]:
        """Those within :meth:`gradients`, as views, of which each tensor-parallel rank has computed a part only."""
        ...

    def take_sums(self) -> None:
        """What is in the copies that were made of gradients in this step, under this layout, are the gradients from
        now on. Called again behind a failure, where the copies hold what the gradients were.
        """
        ...

    def empty_message(self) -> torch.Tensor:
        """Room for one activation or gradient that arrives."""
        ...


class Weights(Protocol):
    """Of which some may still be on their way when a step begins (``rebuild.transfer.Spreading``)."""

    def __bool__(self) -> bool:
        """Some are."""
        ...

    def arrive(self, layer: int) -> None:
        """Returns when those of ``layer`` are here."""
        ...


class Interpreter:
    """Runs programs over ``compute`` and ``channels``.

    ``holder_groups(first, last)`` are those of these layers of one block, None where this rank is the only one;
    ``tensor_group`` that of the worker's ranks that have the other parts, None if there are none.
    ``checkpoint(point, microbatch)`` is called before each instruction; it raises Superseded when the generation
    has ended, and is where faults are injected. Nothing here waits for a device: what it has really done its
    ``ledger`` knows.
    """

    def __init__(
        self,
        compute: Compute,
        channels: Channels,
        holder_groups: Callable[[int, int], Holders[dist.ProcessGroup | None]],
        *,
        weights: Weights,
        tensor_group: dist.ProcessGroup | None,
        num_layers: int,
        checkpoint: Callable[[str, int], None],
        ledger: Ledger,
    ):
        self._compute, self.channels, self.holder_groups = compute, channels, holder_groups
        self._num_layers, self._checkpoint, self._ledger = num_layers, checkpoint, ledger
        self._weights = weights
        self._reduction = Reduction(ledger, tensor_group)
        self._arriving: dict[tuple[Op, int, int], Pending] = {}
        self._progress, self._trace = Progress(0, 0, keeps=False), Trace()
        self._left: deque[Instr] = deque()
        """Of the program at hand, what has not begun."""
        self._handlers: dict[Op, tuple[str, Callable[[Instr], None]]] = {
            Op.FORWARD: ("forward", self._forward),
            Op.EAGER_FORWARD: ("", self._eager_forward),
            Op.INPUT_GRAD: ("backward", self._input_grad),
            Op.BACKWARD: ("backward", self._backward),
            Op.WEIGHT_GRAD: ("weight_grad", self._weight_grad),
            Op.SEND_FORWARD: ("", self._send),
            Op.SEND_BACKWARD: ("", self._send),
            Op.RECV_FORWARD: ("", self._receive),
            Op.RECV_BACKWARD: ("", self._receive),
            Op.REDUCE_GRAD: ("reduce", self._reduce),
        }

    def run(self, program: Sequence[Instr], trace: Trace, progress: Progress) -> None:
        """Everything up to STEP, which is the caller's: it spans all workers (see ``execute/rank.py``).

        ``progress`` says what has been done of the step before, and afterwards what has.
        """
        self._progress, self._trace = progress, trace
        self._left = deque(takewhile(lambda instr: instr.op is not Op.STEP, program))
        while self._left:
            self._next()
        self.channels.wait_sent()
        for instr in self._reduction.finish(progress):
            trace.until_now(instr)
        progress.hand_back(self._compute.take_sums)
        if progress.ahead:  # nobody has died
            progress.ahead.clear()
            self._compute.adopt(())
        if self._arriving:
            raise ScheduleInvalid(
                f"unused messages at the end of the program: {[*self._arriving]}. The schedule was not verified; "
                "please report it with the journal."
            )

    def _next(self) -> None:
        instr = self._left[0]
        point, handler = self._handlers[instr.op]
        self._checkpoint(point, instr.microbatch)
        self._left.popleft()
        with self._trace.span(instr):
            handler(instr)

    def _run_on(self, layer: int) -> None:
        """An input gradient has passed ``layer``: what stands behind it and is above runs beside the rest of it.

        Nothing more does once the generation has ended. Whoever comes next says so: an input gradient that is cut off
        has added nobody knows what.
        """
        with contextlib.suppress(Superseded):
            while self._left and _may_begin(self._left[0], layer, self._num_layers):
                with self._trace.apart():
                    self._next()

    def abandon(self) -> None:
        """Lets go of messages that will not come any more: they would keep their group's threads until a collection."""
        self._arriving.clear()
        self.channels.abandon()
        self._reduction.abandon()

    def _forward(self, instr: Instr) -> None:
        activation, word = self._input(instr, Op.RECV_FORWARD, instr.first, none=not instr.first)
        output, at_end = self._compute_forward(instr, activation, word)
        if instr.last < self._num_layers:
            self._progress.leave(Op.SEND_FORWARD, instr.microbatch, instr.last, output, at_end)
            self._compute.kept(instr.microbatch, instr.first, instr.last)
        else:
            self._progress.add_up(Op.SEND_FORWARD, instr.microbatch, instr.last, [output], at_end)
        self._progress.reached(instr, Op.FORWARD, word, at_end)

    def _eager_forward(self, instr: Instr) -> None:
        # This worker has made it, as the one before on the route.
        activation, word = self._input(instr, Op.RECV_FORWARD, instr.first, none=not instr.first)
        output, at_end = self._compute_forward(instr, activation, word, ahead=True)
        left = output.detach()
        if instr.last < self._num_layers:
            self._compute.kept(instr.microbatch, instr.first, instr.last)
        self._progress.run_ahead(instr, left, word, at_end)

    def _compute_forward(
        self, instr: Instr, activation: torch.Tensor | None, word: Word, *, ahead: bool = False
    ) -> tuple[torch.Tensor, Word]:
        """What comes of it, and whether that counts: weights may come within."""
        needs = self._await if self._weights else None
        with self._trace.computing(instr):
            output = self._compute.forward(
                instr.microbatch, instr.first, instr.last, activation, ahead=ahead, needs=needs
            )
        return output, self._ledger.at_end(word, received=needs is not None)

    def _await(self, layer: int) -> None:
        with self._trace.apart():
            self._weights.arrive(layer)

    def _input_grad(self, instr: Instr) -> None:
        grad, word = self._input(instr, Op.RECV_BACKWARD, instr.last, none=instr.last == self._num_layers)
        # It adds to gradients, too: those of weights that are not deferred.
        with self._trace.computing(instr), self._progress.adding():
            sums_beside = any(one.op is Op.REDUCE_GRAD for one in takewhile(_is_last, self._left))
            input_grad = self._compute.input_grad(
                instr.microbatch,
                instr.first,
                instr.last,
                grad,
                word=word,
                passed=self._run_on if sums_beside else None,
            )
        at_end = self._ledger.at_end(word)
        if instr.first:
            if input_grad is None:
                raise ScheduleInvalid(f"{instr} gave no input gradient")
            self._progress.leave(Op.SEND_BACKWARD, instr.microbatch, instr.first, input_grad, at_end)
        self._progress.reached(instr, Op.INPUT_GRAD, word, at_end)

    def _input(self, instr: Instr, op: Op, edge: int, *, none: bool) -> tuple[torch.Tensor | None, Word]:
        """What was received for ``instr``, or what the neighbouring visit on this worker has left for it; or ``none``.
        And whether ``instr`` counts.
        """
        if none:  # before a loss there is what its forward came to, which counts for nothing if that did
            return None, self._ledger.word(
                self._progress.words.get((Op.SEND_FORWARD, instr.microbatch, edge))
            )
        pending = self._arriving.pop((op, instr.microbatch, edge), None)
        if pending is not None:
            tensor, word = pending.wait()
        else:
            made_by = Op.SEND_FORWARD if op is Op.RECV_FORWARD else Op.SEND_BACKWARD
            tensor, word = self._progress.take(made_by, instr.microbatch, edge)
        word = self._ledger.word(word)
        return only_if(word, tensor.detach()), word

    def _weight_grad(self, instr: Instr) -> None:
        word = self._ledger.word()
        with self._trace.computing(instr), self._progress.adding():
            self._compute.weight_grad(instr.microbatch, instr.first, instr.last)
        self._progress.reached(instr, Op.WEIGHT_GRAD, word, self._ledger.at_end(word))

    def _backward(self, instr: Instr) -> None:
        self._input_grad(instr)
        self._weight_grad(instr)

    def _send(self, instr: Instr) -> None:
        tensor, word = self._progress.take(instr.op, instr.microbatch, instr.first)
        self.channels.send(instr, tensor, word)

    def _receive(self, instr: Instr) -> None:
        room = self._compute.empty_message()
        pending = self.channels.receive(instr, room, with_word=bool(self._ledger))
        self._arriving[instr.op, instr.microbatch, instr.first] = pending

    def _reduce(self, instr: Instr) -> None:
        first, last = instr.first, instr.last
        holders = self.holder_groups(first, last)
        of_parts = {part: self._compute.gradients(first, last, part) for part in holders.groups}
        of_experts = {part: self._compute.expert_gradients(first, last, part) for part in holders.experts}
        every = [one for kind in (of_parts, of_experts) for ones in kind.values() for one in ones]
        self._progress.add_up(Op.REDUCE_GRAD, -1, first, every)
        share = self._compute.share
        for part, gradients in of_parts.items():
            slices = self._compute.slices(first, last, part)
            summed = Summed(gradients, holders.groups[part], slices, holders.ranks)
            partial = self._compute.partial_gradients(first, last, part)
            self._reduction.start(instr, summed, partial, share, self._progress)
        for part, gradients in of_experts.items():
            slices = self._compute.expert_slices(first, last, part)
            summed = Summed(gradients, holders.experts[part], slices, holders.expert_ranks)
            self._reduction.start(instr, summed, (), share, self._progress)


def _is_last(instr: Instr) -> bool:
    """Of what a worker ends with (``plan/reductions.py``): nobody waits for what is before it."""
    return instr.op is Op.WEIGHT_GRAD or instr.op is Op.REDUCE_GRAD


def _may_begin(instr: Instr, layer: int, num_layers: int) -> bool:
    """Whether the gradients that ``instr`` adds to, or sums, are those from ``layer`` on. The weight that embedding and
    head share counts as behind all layers, but is done with the embedding.
    """
    return _is_last(instr) and layer <= instr.first and instr.last <= num_layers
