"""The interpreter carries out one worker's program: a loop over a table of handlers. It takes no decisions."""

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
from odyssey_megatron.execute.reduction import Reduction, Summands
from odyssey_megatron.execute.timing import Trace
from odyssey_megatron.plan.placing.groups import Holders
from odyssey_megatron.plan.schedule import Instr, Op
from odyssey_megatron.plan.scheduling.resume import Visit

Passed = Callable[[int], None]
"""A callback that takes the number of a layer."""

Needs = Callable[[int], None] | None
"""A callback that takes the number of a layer that is about to be computed, and returns when the layer's
weights are here. None: all weights are here.
"""

FORWARD_ONLY = frozenset({Op.FORWARD, Op.SEND_FORWARD, Op.RECV_FORWARD})
"""The instructions of a program that are run in an evaluation. Leaving out the others cannot cause a
deadlock, as it only removes waits.
"""


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
        """Run layers ``[first, last)`` forward and return their output, [s, b, h]; behind the head the loss, 0-D.

        Args:
            activation: The input, [s, b, h]; None where ``first`` is the embedding.
            ahead: This is an eager forward, run for another worker. Neither it nor its losses count before
                :meth:`adopt`.
            needs: Called with each layer before it is computed.
        """
        ...

    def adopt(self, visits: Collection[Visit]) -> None:
        """Make these eager forwards this worker's own, so that they count from now on, and drop all others."""
        ...

    def kept(self, microbatch: int, first: int, last: int) -> None:
        """Note that the output of that forward has an alias now, so the model need not keep its memory."""
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
        """Return the gradient of the input, [s, b, h]; None where ``first`` is the embedding.

        Args:
            grad: The gradient of the output, [s, b, h]; None where ``last`` is behind the head.
            word: A factor for the gradients that begin in the model itself, from its loss and from those of
                routers.
            passed: May be called on the way, with ever lower layers. All that this input gradient adds to the
                gradients of that layer and those above has then been added, and their weight gradients can
                run.
        """
        ...

    def weight_grad(self, microbatch: int, first: int, last: int) -> None:
        """Add the weight gradients of these layers, for a microbatch whose input gradient has run."""
        ...

    def undo(self, visits: Collection[Visit]) -> None:
        """Forget these forwards and all that was counted of them, as they are done anew, here or elsewhere."""
        ...

    def drop_flights(self) -> None:
        """Forget all forwards whose weight gradients have not run, with their activations."""
        ...

    def empty_message(self) -> torch.Tensor:
        """Return an empty tensor, [s, b, h], for one activation or gradient to be received into."""
        ...


class Sums(Protocol):
    """The gradients of the model that are summed over its holders."""

    @property
    def share(self) -> float:
        """The factor by which gradients are multiplied before they are summed; 1.0 leaves them as they are."""
        ...

    def summands(self, first: int, last: int, part: int, *, spread: bool) -> Summands:
        """Return what this rank adds to the sums of layers ``[first, last)`` of one block.

        The gradients are laid out as on the ranks of whole cells. There they are given in place, and in a
        smaller cell as a copy.

        Args:
            part: One of the rank's ``Cell.held_shards``, or with ``spread`` one of its parts.
            spread: The gradients of experts that are spread over ranks, which only the ranks with the same
                experts sum, and not all others.
        """
        ...

    def take_sums(self) -> None:
        """Put into the gradients what the copies of them hold that were made in this step, under this layout.

        Called once more after a failure, when the copies hold the gradients of this worker alone again.
        """
        ...


class Weights(Protocol):
    """Weights, some of which may still be on their way when a step begins (``rebuild.transfer.Spreading``)."""

    def __bool__(self) -> bool:
        """Whether some weights are still on their way."""
        ...

    def arrive(self, layer: int) -> None:
        """Return when the weights of ``layer`` are here."""
        ...


class Interpreter:
    """Runs programs over ``compute``, ``sums`` and ``channels``.

    Nothing here waits for a device: ``ledger`` knows what the device has really done.

    Args:
        holder_groups: Called with the range ``(first, last)`` of layers of one block; gives the groups of
            their holders, None where this rank is the only one.
        weights: The weights that may still be on their way.
        tensor_group: The group of the worker's tensor-parallel ranks; None if there is one rank only.
        checkpoint: Called with ``(point, microbatch)`` before each instruction. It raises Superseded when the
            generation has ended, and is where faults are injected.
    """

    def __init__(
        self,
        compute: Compute,
        sums: Sums,
        channels: Channels,
        holder_groups: Callable[[int, int], Holders[dist.ProcessGroup | None]],
        *,
        weights: Weights,
        tensor_group: dist.ProcessGroup | None,
        num_layers: int,
        checkpoint: Callable[[str, int], None],
        ledger: Ledger,
    ):
        self._compute, self._sums = compute, sums
        self.channels, self.holder_groups = channels, holder_groups
        self._num_layers, self._checkpoint, self._ledger = num_layers, checkpoint, ledger
        self._weights = weights
        self._reduction = Reduction(ledger, tensor_group)
        self._arriving: dict[tuple[Op, int, int], Pending] = {}
        self._progress, self._trace = _no_step(), Trace()
        self._left: deque[Instr] = deque()
        """The instructions of the program at hand that have not begun."""
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
        """Run everything before STEP, which spans all workers and is left to the caller (``execute/training.py``).

        ``progress`` says what has been done of the step before, and is updated with what this does.
        """
        self._progress, self._trace = progress, trace
        self._left = deque(takewhile(lambda instr: instr.op is not Op.STEP, program))
        while self._left:
            self._next()
        self.channels.wait_sent()
        for instr in self._reduction.finish(progress):
            trace.until_now(instr)
        progress.hand_back(self._sums.take_sums)
        # The program is through without a failure, so nobody needs the eager forwards.
        if progress.ahead:
            progress.ahead.clear()
            self._compute.adopt(())
        self._progress = _no_step()
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
        """Run the end of the program, for layers from ``layer`` on, beside the input gradient that has passed it.

        These instructions stop quietly once the generation has ended. Whatever is run next raises Superseded
        for it: raised here, it would cut off the input gradient, of which nobody would know what it had
        added.
        """
        with contextlib.suppress(Superseded):
            while self._left and _may_begin(self._left[0], layer, self._num_layers):
                with self._trace.apart():
                    self._next()

    def abandon(self) -> None:
        """Let go of messages that will not come: they would keep their group's threads alive until a collection."""
        self._arriving.clear()
        self._progress = _no_step()
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
        # The input may be the output of this very worker, if it is also the one before on the route.
        activation, word = self._input(instr, Op.RECV_FORWARD, instr.first, none=not instr.first)
        output, at_end = self._compute_forward(instr, activation, word, ahead=True)
        left = output.detach()
        if instr.last < self._num_layers:
            self._compute.kept(instr.microbatch, instr.first, instr.last)
        self._progress.run_ahead(instr, left, word, at_end)

    def _compute_forward(
        self, instr: Instr, activation: torch.Tensor | None, word: Word, *, ahead: bool = False
    ) -> tuple[torch.Tensor, Word]:
        """Return the output, and the word that says whether it counts. Weights may arrive meanwhile."""
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
        # This adds to gradients, too: to those of weights whose gradients are not deferred.
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
        """Return the input of ``instr`` and the word that says whether ``instr`` counts.

        The input is what was received, or what the neighbouring visit on this worker has left; with ``none``
        there is no input.
        """
        # The input gradient behind the head begins from the losses of its forward: it counts for nothing if
        # that did.
        if none:
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
        holders = self.holder_groups(instr.first, instr.last)
        every = [
            (self._sums.summands(instr.first, instr.last, part, spread=spread), group, ranks)
            for groups, ranks, spread in (
                (holders.groups, holders.ranks, False),
                (holders.experts, holders.expert_ranks, True),
            )
            for part, group in groups.items()
        ]
        gradients = [one for own, *_ in every for one in own.gradients]
        self._progress.add_up(Op.REDUCE_GRAD, -1, instr.first, gradients)
        for own, group, ranks in every:
            self._reduction.start(instr, own, group, ranks, self._sums.share, self._progress)


def _no_step() -> Progress:
    """Return the progress of no step, in place of one that is over: its messages go with it."""
    return Progress(0, 0, keeps=False)


def _is_last(instr: Instr) -> bool:
    """Whether ``instr`` is of the kind that ends a program, where other workers wait for its sums only.

    See ``plan/scheduling/reductions.py``.
    """
    return instr.op is Op.WEIGHT_GRAD or instr.op is Op.REDUCE_GRAD


def _may_begin(instr: Instr, layer: int, num_layers: int) -> bool:
    """Whether ``instr`` adds to, or sums, only gradients of layers from ``layer`` on.

    The weight that embedding and head share counts as behind all layers, but is done only with the embedding.
    """
    return _is_last(instr) and layer <= instr.first and instr.last <= num_layers
