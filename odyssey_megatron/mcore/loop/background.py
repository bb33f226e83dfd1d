"""Saves of a job: common work of all ranks, the writing of which goes on beside training with --async-save.

Such a save has three parts. Together the ranks plan it and copy what each will write (that is the stall). A thread of
each writes, while steps go on: a process would outlive the rank. Behind a step whose agreement has said that nobody
writes any more they complete it together. Until then it has no name that a checkpoint has (``saving.py``). Who dies in
between takes its part along; so the survivors give the save up and make another, of the step that they have reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from odyssey_megatron.errors import PeerFailed, Superseded
from odyssey_megatron.execute.parts import FaultPoint
from odyssey_megatron.execute.rank import RankRuntime
from odyssey_megatron.mcore.loop import saving
from odyssey_megatron.mcore.plugin import Session
from odyssey_megatron.rebuild.world import Together


class _Job(NamedTuple):
    """Whose saves they are, once the session has begun."""

    session: Session
    runtime: RankRuntime
    fault_point: FaultPoint


class _Flight:
    """A save that this rank is writing its part of."""

    def __init__(self, request: Any, generation: int, step: int):
        """``request``: Megatron's AsyncRequest; it was made behind ``step`` steps."""
        self.finalize: Sequence[Callable[[], None]] = request.finalize_fns
        self.generation, self.step = generation, step
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = _copied(arguments[1], request.preload_fn())
        write = request.async_fn or (lambda: None)  # nothing of it is here
        self._thread = threading.Thread(
            target=lambda: write(*arguments, **request.async_fn_kwargs), name="odyssey-save", daemon=True
        )
        self._thread.start()

    @property
    def writes(self) -> bool:
        return self._thread.is_alive()

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Until this rank has written. Raises Superseded if ``is_over`` says so before."""
        while self._thread.is_alive():
            self._thread.join(0.05)
            if is_over():
                raise Superseded("a newer generation exists")


def _copied(buckets: Sequence[Any], on_host: Sequence[Any]) -> list[Any]:
    """What Megatron has brought to host memory, and copies of what was there before, which the next step changes."""
    old = {id(tensor) for *_, (_, tensors) in buckets for _, tensor in tensors}
    return [
        (*names, (data, [(item, one.clone() if id(one) in old else one) for item, one in tensors]))
        for *names, (data, tensors) in on_host
    ]


class Saves:
    """The saves of one rank."""

    def __init__(self, together: Together, chunks: list[Any]):
        """``chunks``: the model's, whichever they are by then."""
        self._together, self._chunks = together, chunks
        self.not_saved = ""
        """Why the last save has failed, if it has."""
        self._attached: _Job | None = None
        self._flight: _Flight | None = None
        self._how: tuple[Any, ...] = ()
        """What Megatron has called last, and with what; keywords come last."""
        self._begun = (0, 0.0)
        """Iteration of the last save, and floating point operations until there."""
        self._trouble = ""
        """What has failed on this rank alone."""
        self._waited_s = 0.0
        """How long training stood still for the last piece of a save."""

    def attach(self, session: Session, runtime: RankRuntime, fault_point: FaultPoint) -> None:
        self._attached = _Job(session, runtime, fault_point)
        runtime.ballot.writes = self._writes

    @property
    def _job(self) -> _Job:
        assert self._attached is not None
        return self._attached

    def _writes(self) -> bool:
        flight = self._flight
        return flight is not None and flight.generation == self._job.runtime.generation and flight.writes

    # -- what Megatron calls ----------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        original: Any,
        iteration: int,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        floating_point_operations: float,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if self._flight is not None:
            self._land(again=False)
        self._how = original, optimizer, scheduler, args, kwargs
        self._begun = iteration, floating_point_operations
        self._say(self._on_all(self._save))
        self.finalize()  # a rank may come before the next step

    def schedule(self, original: Any, request: Any) -> None:
        """Megatron's ``schedule_async_save``."""
        self._flight = _Flight(request, self._job.runtime.generation, self._job.runtime.committed)

    def finalize(self, original: Any = None, blocking: bool = False, terminate: bool = False) -> None:
        """Megatron's ``maybe_finalize_async_save``, behind each step.

        Whether there is common work to do must be the same on all ranks. So nobody looks at the generation, which some
        know to have ended before others do, but at what all have agreed on with the step. And whoever comes with an
        offered generation has no part in what is being written, which must be a checkpoint before.
        """
        while (flight := self._flight) is not None:
            votes = self._job.runtime.votes
            written = self._job.runtime.committed > flight.step and not votes.writing
            if not (blocking or written or votes.ballots):
                return
            self._land()

    # -- what it comes to -------------------------------------------------------------------------------------------

    def _save(self) -> str:
        original, optimizer, scheduler, args, kwargs = self._how
        iteration, floating_point_operations = self._begun
        self._flight = None
        self._fault("checkpoint", iteration)
        return saving.attempt(
            original,
            iteration,
            self._chunks,
            optimizer,
            scheduler,
            floating_point_operations,
            *args,
            **kwargs,
        )

    def _save_again(self) -> str:
        """The step that the job has reached."""
        from megatron.training import get_args, training

        args, (iteration, before) = get_args(), self._begun
        since = self._job.runtime.committed - iteration
        per_step = training.num_floating_point_operations(args, args.global_batch_size)
        self._begun = iteration + since, before + since * per_step
        return self._save()

    def _land(self, *, again: bool = True) -> None:
        """What is being written becomes a checkpoint. Where a rank has died since, another is begun in its place, or,
        without ``again``, none.
        """
        flight = self._flight
        assert flight is not None

        def work() -> str:
            if flight.generation != self._job.runtime.generation:
                self._flight = None
                return self._save_again() if again else ""
            self._fault("checkpoint", self._job.runtime.committed)
            flight.wait(lambda: self._job.session.member.newer_than(flight.generation))
            why = saving.complete(flight.finalize, self._begun[0], **self._how[-1])
            self._flight = None
            return why

        self._say(self._on_all(work))

    def _on_all(self, work: Callable[[], str]) -> str:
        """What ``work`` returns. What fails on one rank for want of a disk fails on all, and is said in its place.

        A rank alone cannot tell the others, which wait for it in some collective. So it ends the generation, as if
        somebody had died; nobody has, and in the next one all hear why.
        """

        def attempt(world: Any) -> str:
            found: list[Any] = [None] * world.size()
            dist.all_gather_object(found, self._trouble, group=world)
            if trouble := next(filter(None, found), ""):
                self._flight = None
                saving.tidy(self._begun[0], **self._how[-1])
                return str(trouble)
            try:
                return work()
            except (OSError, RuntimeError) as error:
                if not saving.is_of_storage(error):
                    raise
                self._trouble = f"rank {self._job.session.rank} could not write a file: {error!r}"
                raise PeerFailed(self._trouble) from error

        began_s = time.monotonic()
        why: str = self._together(attempt)
        self._trouble, self._waited_s = "", time.monotonic() - began_s
        return why

    def _say(self, why: str) -> None:
        self.not_saved = why
        if dist.get_rank() == 0:
            self._job.session.note_save(self._job.runtime.committed, self._waited_s)
            if why:
                self._job.session.note_not_saved(self._begun[0], why)

    def _fault(self, point: str, step: int) -> None:
        self._job.fault_point(point, step=step, generation=self._job.runtime.generation, microbatch=-1)
