"""The interpreter: a handler table and a loop. It carries out one worker's program and has no opinions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from odyssey_megatron.errors import ScheduleInvalid
from odyssey_megatron.execute.channels import Channels, Pending
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.execute.timing import Trace
from odyssey_megatron.plan.resume import Visit
from odyssey_megatron.plan.schedule import Instr, Op

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
        self, microbatch: int, first: int, last: int, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Gradient of the input; ``grad`` (of the output) is None where ``last`` is behind the head."""
        ...

    def weight_grad(self, microbatch: int, first: int, last: int) -> None:
        """Adds the weight gradients of a microbatch whose input gradient has run."""
        ...

    def gradients(self, first: int, last: int) -> Sequence[torch.Tensor]:
        """The 1-D gradient buffers of block ``[first, last)``, to be summed over its holders in place."""
        ...

    def expert_gradients(self, first: int, last: int) -> Sequence[torch.Tensor]:
        """Of experts that are spread over ranks, which only those sum who have the same ones."""
        ...

    @property
    def share(self) -> float:
        """What gradients are multiplied with before they are summed; 1.0: nothing."""
        ...

    def partial_gradients(self, first: int, last: int) -> Sequence[torch.Tensor]:
        """Those within :meth:`gradients` of which each tensor-parallel rank has computed a part only."""
        ...

    def empty_message(self) -> torch.Tensor:
        """Room for one activation or gradient that arrives."""
        ...


class Interpreter:
    """Runs programs over ``compute`` and ``channels``.

    ``holder_groups(first, last)`` are the groups of all who have this rank's part of a block, and of all who have its
    experts, None where it is the only one; ``tensor_group`` that of the worker's ranks that have the other parts, None
    if there are none.
    ``checkpoint(point, microbatch)`` is called before each instruction; it raises Superseded when the generation
    has ended, and is where faults are injected. ``settle()`` is called after each compute instruction of a step that
    may have to go on after a failure; it raises unless that instruction has really run, on whole messages.
    """

    def __init__(
        self,
        compute: Compute,
        channels: Channels,
        holder_groups: Callable[[int, int], tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]],
        *,
        tensor_group: dist.ProcessGroup | None,
        num_layers: int,
        checkpoint: Callable[[str, int], None],
        settle: Callable[[], None],
    ):
        self._compute, self._channels, self._holder_groups = compute, channels, holder_groups
        self._tensor_group = tensor_group
        self._num_layers, self._checkpoint, self._settle = num_layers, checkpoint, settle
        self._arriving: dict[tuple[Op, int, int], Pending] = {}
        self._progress = Progress(0, 0, keeps=False)
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
        self._progress = progress
        for instr in program:
            if instr.op is Op.STEP:
                break
            point, handler = self._handlers[instr.op]
            self._checkpoint(point, instr.microbatch)
            with trace.span(instr):
                handler(instr)
        if progress.ahead:  # all is reduced, so nothing can be taken up any more
            progress.ahead.clear()
            self._compute.adopt(())
        self._channels.wait_sent()
        if self._arriving:
            raise ScheduleInvalid(
                f"unused messages at the end of the program: {[*self._arriving]}. The schedule was not verified; "
                "please report it with the journal."
            )

    def abandon(self) -> None:
        """Lets go of messages that will not come any more: they would keep their group's threads until a collection."""
        self._arriving.clear()
        self._channels.abandon()

    def _forward(self, instr: Instr) -> None:
        activation = self._input(instr, Op.RECV_FORWARD, instr.first) if instr.first else None
        output = self._compute.forward(instr.microbatch, instr.first, instr.last, activation)
        if instr.last < self._num_layers:
            self._progress.leave(Op.SEND_FORWARD, instr.microbatch, instr.last, output)
            self._compute.kept(instr.microbatch, instr.first, instr.last)
        else:
            self._progress.add_up(Op.SEND_FORWARD, instr.microbatch, instr.last, [output])
        self._settled()
        self._progress.reached(instr, Op.FORWARD)

    def _eager_forward(self, instr: Instr) -> None:
        activation = (
            self._input(instr, Op.RECV_FORWARD, instr.first) if instr.first else None
        )  # it has made it
        output = self._compute.forward(instr.microbatch, instr.first, instr.last, activation, ahead=True)
        left = output.detach()
        if instr.last < self._num_layers:
            self._compute.kept(instr.microbatch, instr.first, instr.last)
        self._settled()
        self._progress.ahead[instr.microbatch, instr.first, instr.last] = left

    def _input_grad(self, instr: Instr) -> None:
        grad = self._input(instr, Op.RECV_BACKWARD, instr.last) if instr.last < self._num_layers else None
        with self._progress.adding():  # weight gradients of what is not deferred
            input_grad = self._compute.input_grad(instr.microbatch, instr.first, instr.last, grad)
            self._settled()
        if instr.first:
            if input_grad is None:
                raise ScheduleInvalid(f"{instr} gave no input gradient")
            self._progress.leave(Op.SEND_BACKWARD, instr.microbatch, instr.first, input_grad)
        self._progress.reached(instr, Op.INPUT_GRAD)

    def _input(self, instr: Instr, op: Op, edge: int) -> torch.Tensor:
        """What was received for ``instr``, or what the neighbouring visit on this worker has left for it."""
        pending = self._arriving.pop((op, instr.microbatch, edge), None)
        if pending is not None:
            return pending.wait()
        made_by = Op.SEND_FORWARD if op is Op.RECV_FORWARD else Op.SEND_BACKWARD
        return self._progress.take(made_by, instr.microbatch, edge).detach()

    def _settled(self) -> None:
        if self._progress.keeps:
            self._settle()

    def _weight_grad(self, instr: Instr) -> None:
        with self._progress.adding():
            self._compute.weight_grad(instr.microbatch, instr.first, instr.last)
            self._settled()
        self._progress.reached(instr, Op.WEIGHT_GRAD)

    def _backward(self, instr: Instr) -> None:
        self._input_grad(instr)
        self._weight_grad(instr)

    def _send(self, instr: Instr) -> None:
        self._channels.send(instr, self._progress.take(instr.op, instr.microbatch, instr.first))

    def _receive(self, instr: Instr) -> None:
        room = self._compute.empty_message()
        self._arriving[instr.op, instr.microbatch, instr.first] = self._channels.receive(instr, room)

    def _reduce(self, instr: Instr) -> None:
        group, expert_group = self._holder_groups(instr.first, instr.last)
        gradients = self._compute.gradients(instr.first, instr.last)
        of_experts = self._compute.expert_gradients(instr.first, instr.last)
        everything = [*gradients, *of_experts]
        self._progress.add_up(Op.REDUCE_GRAD, -1, instr.first, everything)
        if group is not None and self._progress.keeps:
            # As long as a holder is missing nothing is summed, and a failure costs nobody what he has added up.
            dist.barrier(group=group)
        if self._compute.share != 1.0:
            self._progress.whole = False
            torch._foreach_mul_(everything, self._compute.share)
        # First within each cell: then the sum over the holders leaves the same bytes on all of them.
        partial = self._compute.partial_gradients(instr.first, instr.last) if self._tensor_group else ()
        if partial:
            self._progress.whole = False
            flat = _flatten_dense_tensors(partial)  # type: ignore[no-untyped-call]
            dist.all_reduce(flat, group=self._tensor_group)
            summed = _unflatten_dense_tensors(flat, partial)  # type: ignore[no-untyped-call]
            torch._foreach_copy_(list(partial), list(summed))
        for buffers, holders in ((gradients, group), (of_experts, expert_group)):
            if holders is not None:
                self._progress.whole = False
                for buffer in buffers:
                    dist.all_reduce(buffer, group=holders)
