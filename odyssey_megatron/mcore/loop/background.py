"""Saves a job's checkpoints: common work of all ranks, whose writing goes on beside training with --async-save.

Such a save has three parts. First the ranks together plan it and copy what each of them will write; this is the stall.
Then a thread of each rank writes, while steps go on; a process would outlive the rank. After a step whose agreement has
said that nobody is writing any more, the ranks together complete it. Until then it does not have a checkpoint's name
(``saving.py``). A rank that dies in between takes its part along, so the survivors abandon the save and make another,
of the step that they have reached. A thread cannot be ended: where the file system does not answer, the save fails,
and no other begins before its thread has ended, as each of them keeps a copy of what it writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from odyssey_megatron.errors import PeerFailed, Superseded
from odyssey_megatron.execute.parts import FaultPoint
from odyssey_megatron.execute.rank import RankRuntime
from odyssey_megatron.mcore.loop import attempts, deleting, saving, tracker
from odyssey_megatron.mcore.model.model import MegatronModel
from odyssey_megatron.mcore.plugin import Session
from odyssey_megatron.names import size_text
from odyssey_megatron.rebuild.world import Together

_PART_OF_LIMIT = 0.9
"""How much of the limit for messages a rank waits for its own file system. It speaks before the others' messages fail,
so that they hear the cause.
"""


class _Job(NamedTuple):
    """The session and runtime that saves belong to, once the session has begun."""

    session: Session
    runtime: RankRuntime
    model: MegatronModel
    fault_point: FaultPoint


class _Flight:
    """A save of which this rank is writing its part."""

    def __init__(self, request: Any, generation: int, step: int):
        """``request``: Megatron's AsyncRequest, which was made after ``step`` steps."""
        self.finalize: Sequence[Callable[[], None]] = request.finalize_fns
        self.generation, self.step = generation, step
        self._began_s = time.monotonic()
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = _copied(arguments[1], request.preload_fn())
        write = request.async_fn or (lambda: None)  # this rank has nothing to write
        self._thread = threading.Thread(
            target=lambda: write(*arguments, **request.async_fn_kwargs), name="odyssey-save", daemon=True
        )
        self._thread.start()

    @property
    def writes(self) -> bool:
        return self._thread.is_alive()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began_s

    def wait(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Wait until this rank has finished writing. Raises Superseded as soon as ``is_over`` returns True, and
        TimeoutError after ``limit_s``.
        """
        ends_s = time.monotonic() + limit_s
        while self._thread.is_alive():
            self._thread.join(0.05)
            if is_over():
                raise Superseded("a newer generation exists")
            if time.monotonic() > ends_s:
                raise TimeoutError(
                    f"not written {self.age_s:.0f} s after the save began, for {limit_s:.0f} s of which all ranks have "
                    "waited. Look whether its file system answers"
                )


def _copied(buckets: Sequence[Any], on_host: Sequence[Any]) -> list[Any]:
    """What Megatron has brought to host memory; tensors that were there before are copied, since the next step changes
    them.
    """
    old = {id(tensor) for *_, (_, tensors) in buckets for _, tensor in tensors}
    return [
        (*names, (data, [(item, one.clone() if id(one) in old else one) for item, one in tensors]))
        for *names, (data, tensors) in on_host
    ]


def standing(folder: Path) -> str:
    """What ``folder`` has behind a failed save, as a sentence: a checkpoint to go on from, and room for another one."""
    has = []
    with contextlib.suppress(OSError):
        latest = tracker.tracked(folder)
        none = tracker.fault(folder) or "there is no checkpoint"
        has.append(f"{latest} is still the latest checkpoint" if latest else none)
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        free, size = (size_text(blocks * disk.f_frsize) for blocks in (disk.f_bavail, disk.f_blocks))
        has.append(f"{free} of {size} are free")
    return f"In {folder} {', and '.join(has)}" if has else f"{folder} cannot be read"


def _return_memory() -> None:
    """Give the memory of a save's copies back to the system. After the first one glibc may keep it until the next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Saves:
    """The saves of one rank."""

    def __init__(self, together: Together, chunks: list[Any]):
        """``chunks``: the list of the model's chunks, which is kept up to date."""
        self._together, self._chunks = together, chunks
        self.not_saved = ""
        """Why the last save failed; empty: it did not."""
        self._attached: _Job | None = None
        self._flight: _Flight | None = None
        self._given_up: list[_Flight] = []
        """Saves that will be no checkpoints, whose threads may write for ever."""
        self._how: tuple[Any, ...] = ()
        """Megatron's save function and arguments of the last save; the keyword arguments come last."""
        self._begun = (0, 0.0)
        """Iteration of the last save, and the number of floating point operations until then."""
        self._trouble = ""
        """What has failed on this rank alone."""
        self._waited_s = 0.0
        """Time that training stood still for the last piece of a save."""

    def attach(
        self, session: Session, runtime: RankRuntime, model: MegatronModel, fault_point: FaultPoint
    ) -> None:
        self._attached = _Job(session, runtime, model, fault_point)
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
        self.finalize()  # a rank may join before the next step

    def schedule(self, original: Any, request: Any) -> None:
        """Megatron's ``schedule_async_save``: begin to write this rank's part."""
        self._flight = _Flight(request, self._job.runtime.generation, self._job.runtime.committed)

    def finalize(self, original: Any = None, blocking: bool = False, terminate: bool = False) -> None:
        """Megatron's ``maybe_finalize_async_save``, called after each step.

        All ranks must decide alike whether there is common work to do. So they do not go by the generation, which some
        know to have ended before others do, but by what all have agreed on with the step. A save in progress must be
        complete before an offered generation begins, since a rank that joins with it has no part in the save.
        """
        while (flight := self._flight) is not None:
            votes = self._job.runtime.position.votes
            written = self._job.runtime.committed > flight.step and not votes.writing
            if not (blocking or written or votes.ballots):
                return
            self._land()

    # -- what it comes to -------------------------------------------------------------------------------------------

    def _save(self) -> str:
        original, optimizer, scheduler, args, kwargs = self._how
        iteration, floating_point_operations = self._begun
        why = self._hanging()  # what is given up now may still be written: it has not been waited for
        self._give_up()
        if why:
            return why
        self._fault(iteration)
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

    def _give_up(self) -> None:
        """Forget what is being written, except for the thread that writes it."""
        flights = *self._given_up, self._flight
        self._given_up = [one for one in flights if one is not None and one.writes]
        self._flight = None

    def _hanging(self) -> str:
        """What some rank still writes although it was given up earlier; empty: nothing. Collective."""
        own = next((one for one in self._given_up if one.writes), None)
        since = own and (
            f"rank {self._job.session.rank} still writes the save of iteration {own.step}, which was given up, for "
            f"{own.age_s:.0f} s now, and none begins beside it. Look whether its file system answers"
        )
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, since)
        return next(filter(None, found), "")

    def _save_again(self) -> str:
        """Save the step that the job has reached by now."""
        from megatron.training import get_args

        (iteration, before), reached = self._begun, self._job.runtime.committed
        self._begun = (
            reached,
            before + self._job.model.microbatches.batches.operations(get_args(), iteration, reached),
        )
        return self._save()

    def _land(self, *, again: bool = True) -> None:
        """Turn what is being written into a checkpoint. If a rank has died since it began, begin another save in its
        place, or, without ``again``, none.
        """
        flight = self._flight
        assert flight is not None

        def work() -> str:
            if flight.generation != self._job.runtime.generation:
                if self._is_in_place():
                    return ""
                return self._save_again() if again else "given up: its generation ended while it was written"
            self._fault(self._job.runtime.committed)
            flight.wait(
                lambda: self._job.session.member.newer_than(flight.generation),
                _PART_OF_LIMIT * self._job.session.config.op_timeout_s,
            )
            why = saving.complete(flight.finalize, self._begun[0], **self._how[-1])
            self._flight = None
            return why

        self._say(self._on_all(work))
        _return_memory()

    def _on_all(self, work: Callable[[], str]) -> str:
        """What ``work`` returns on all ranks. A storage error on one rank makes the save fail on all, with its message
        as the result.

        A single rank cannot tell the others, which wait for it in some collective. So it ends the generation, as if
        somebody had died, and in the next one all ranks hear why.
        """

        begun = False

        def attempt(world: Any) -> str:
            nonlocal begun
            found: list[Any] = [None] * world.size()
            writes = self._flight is not None and self._flight.writes
            dist.all_gather_object(found, (self._trouble, writes, begun), group=world)
            troubles, writing, again = zip(*found, strict=True)
            begun, trouble = True, next(filter(None, troubles), "")
            answers = not (trouble and any(writing))  # else a file system may not
            if any(again) and answers and self._is_in_place():
                return ""
            if trouble:
                self._give_up()
                if answers:
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

    def _is_in_place(self) -> bool:
        """Whether an attempt at the save that a death has cut short had put its checkpoint in place: then that is the
        latest one, and the one before is deleted. Collective.
        """
        iteration, kwargs = self._begun[0], self._how[-1]
        if not saving.finish(iteration, **kwargs):
            return False
        self._give_up()
        if dist.get_rank() == 0:
            deleting.delete_before(saving.where(iteration, **kwargs), attempts.noted.latest_before)
        return True

    def _say(self, why: str) -> None:
        self.not_saved = why
        if dist.get_rank() == 0:
            self._job.session.note_save(self._job.runtime.committed, self._waited_s)
            if why:
                stands = standing(saving.where(self._begun[0], **self._how[-1]).parent)
                self._job.session.note_not_saved(self._begun[0], f"{why}. {stands}")

    def _fault(self, step: int) -> None:
        self._job.fault_point("checkpoint", step=step, generation=self._job.runtime.generation, microbatch=-1)
