"""Starts dead ranks of a node again: anew if the job has not begun; otherwise they join it.

A rank that is killed before it has met any other, and before there is a plan, is not missed by the others, who still
wait for all ranks. It is started anew in its own place, with or without ``--odyssey-respawn``. The ranks of a script
that does not know Odyssey have met by ways of their own, so that none of them is.

A rank that has used up its starts (``lives.py``) is given up, and so is its GPU as far as this agent can tell; see
``places.py``. People who know that the GPU works again say so (``odyssey readmit``).

The other ranks of its cell have not died, but have left with it. They start again as a smaller cell, with or without
``--odyssey-respawn``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import api as multiprocessing_api

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.places import ComesBack, Move, Places, numbers
from odyssey_megatron.codec import from_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import EXIT_FENCED, ConfigError
from odyssey_megatron.launch.agent.lives import ANEW, AT_MOST_S, Lives
from odyssey_megatron.launch.agent.readmission import Readmitted, outlook, slot_of
from odyssey_megatron.launch.process.forking import forking
from odyssey_megatron.launch.process.zygote import Zygote
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.metrics.journal import Journal, host_name
from odyssey_megatron.metrics.outlet import say

_GIVEN_UP = (
    "rank {rank} is given up, with GPU {slot} of {host} (--odyssey-respawn {respawn}). Once that GPU works again: "
    "odyssey readmit {run_dir} --rank {rank}"
)
_FENCED = (
    "rank {rank} has ended, as the job goes on without it: it was declared dead while this node did not renew its "
    "lease or was not heard, or it was slow and replaced. It does not come back by itself (--odyssey-respawn "
    "{respawn}). To start it again on GPU {slot} of {host}: odyssey readmit {run_dir} --rank {rank}"
)


def forget_smaller(control: Control, ranks: Sequence[int]) -> None:
    """Have the cells of ``ranks`` begin as whole cells: their node is a new one, which has lost no rank."""
    if (job := _job(control)) is not None:
        for worker in {rank // job.cell_size for rank in ranks}:
            control.put(keys.places_key(worker), "0")


def _job(control: Control) -> JobSpec | None:
    """Return the job, or None before its ranks have posted it."""
    if not control.has([keys.JOB]):
        return None
    return from_json(JobSpec, json.loads(control.get(keys.JOB))["job"])


def first_incarnation() -> int:
    """Return the incarnation of the processes that were started with this agent."""
    return int(os.environ.get("ODYSSEY_INCARNATION", "0"))


class Respawn:
    """Decides which ranks of a node start again, and starts them: each at most ``config.respawn`` times in a running
    job.
    """

    def __init__(
        self,
        context: Any,
        control: Control,
        config: OdysseyConfig,
        zygote: Zygote | None,
        journal: Journal,
    ):
        """``context`` is torch elastic's, of the processes that were started first."""
        self._context, self._control, self._zygote, self._journal = context, control, zygote, journal
        self._config, self._shrinks = config, config.shrink == "auto"
        self._lives = Lives(config.respawn, config.store_timeout_s, time.monotonic())
        slots = {int(env["RANK"]): slot for slot, env in context.envs.items()}
        self._world_size = int(next(iter(context.envs.values()))["WORLD_SIZE"])
        self._places = Places(slots, whole_job=len(slots) == self._world_size)
        self._due: list[tuple[float, int]] = []
        """(when, rank) for each rank that is to be started."""
        self.wanted: set[int] = set()
        """Slots whose processes must end, to make room for another rank."""
        self._running = dict.fromkeys(context.envs, 0)
        """Slot that has a running process -> the number of ranks of the smaller cell that it is in; 0: it is in none.
        """
        self._incarnations: dict[int, int] = {}
        """Rank -> incarnation, for ranks that have been started again."""
        self._put_off: set[int] = set()
        """Ranks that could not be started when they were due, of which people have been told."""
        self._left: set[int] = set()
        """Ranks that have left with their cell, and do not start again by themselves (``--odyssey-respawn 0``)."""
        self._awake: set[int] = set()
        """The workers whose ranks start again when they have left with their cell, without the flag."""
        self._carried_out: dict[int, str] = {}
        """Worker -> the value of its ``keys.comes_back_key`` that has been carried out."""

    def unmissed(self, rank: int, code: int) -> bool:
        """Whether the end of ``rank`` with ``code`` need not be reported, as it starts anew before the job begins."""
        if not self._lives.may_begin_anew(rank, code, time.monotonic()):
            return False
        if keys.is_stranger(self._control, self._config.mode):
            return False
        planned = self._control.has([keys.digest_key(one) for one in range(self._world_size)])
        if planned or self._control.has([keys.met_key(rank)]):
            return False
        times = self._lives.begin_anew(rank)
        say(
            f"[odyssey] rank {rank} was ended by signal {-code} before the job began: it is started anew ({times} of "
            f"at most {ANEW} times)."
        )
        return True

    def note_end(self, rank: int, slot: int, code: int, now_s: float) -> None:
        """Note that ``rank`` ended in ``slot``, and arrange for what follows.

        The rank is not started again if it has finished, was refused, has died too often, or had wrong numbers in this
        slot twice.
        """
        self._running.pop(slot, None)
        if not self._has_next(rank):
            self._control.put(keys.here_key(rank), "")
        if slot in self.wanted:
            self.wanted.discard(slot)
            return  # the rank that is to have the slot is in _due
        if self._lives.is_over(rank, code):
            return
        if self._lives.was_wrong_before(slot, code):
            say(f"[odyssey] rank {rank} was left out for wrong numbers before: it is not started again")
        if code == EXIT_FENCED:
            self._arrange(rank)
        job = _job(self._control)
        in_s = self._lives.next_in_s(rank, slot, code, now_s)
        if in_s is not None and (code != EXIT_FENCED or self._comes_back(rank, job)):
            self._due.append((now_s + in_s, rank))
        elif in_s is not None and job and job.cell_size > 1:
            self._left.add(rank)
        elif job or self._config.respawn:  # otherwise there is nothing to come back to
            self._give_up(rank, slot, code, job, now_s)

    def _give_up(self, rank: int, slot: int, code: int, job: JobSpec | None, now_s: float) -> None:
        self._places.lose(rank)
        self._journal.event("given_up", target=rank, slot=slot, host=host_name(), echo=True)
        about = _FENCED if code == EXIT_FENCED else _GIVEN_UP
        where = {"slot": slot, "host": host_name(), "run_dir": self._config.run_dir}
        say("[odyssey] " + about.format(rank=rank, respawn=self._config.respawn, **where))
        if job is None:
            return
        if self._shrinks or self._config.respawn:
            self._complete(now_s, job.cell_size)
        for worker in self._places.broken(job.cell_size):
            self._shrink(now_s, job, worker)

    def readmit(self, rank: int, gpu: int | None, state: str, now_s: float) -> Readmitted:
        """Arrange for a start on a GPU that works again: of the rank that was given up there, or of another one that is
        without a GPU by now.

        Args:
            rank, gpu, state: As in :func:`slot_of`.

        Raises:
            ConfigError: ``rank`` was not given up.
        """
        if waits_s := [at_s - now_s for at_s, one in self._due if one == rank]:
            state = f"rank {rank} is started again by itself, in {max(*waits_s, 0.0):.1f} s"
        slot, job = slot_of(rank, gpu, self._places.given_up, state), _job(self._control)
        if job is None:
            raise ConfigError("the job has not begun. Try again once it trains.")
        starts, before = self._places.readmit(slot, job.cell_size)
        worker = starts // job.cell_size
        self._lives.readmit(starts, slot)
        self._due.append((now_s, starts))
        self._journal.event("readmitted", target=starts, slot=slot, host=host_name(), echo=True)
        self._complete(now_s, job.cell_size)
        self._wake(worker, job.cell_size, now_s)
        now = self._places.size_left(worker, job.cell_size)
        if now < job.cell_size:
            self._shrink(now_s, job, worker)
            now = self._places.size_left(worker, job.cell_size)
        elif before:
            self._control.put(keys.places_key(worker), "0")
        lacks = job.cell_size - len(self._places.living(worker, job.cell_size))
        cell = numbers(worker, job.cell_size)
        return Readmitted(starts, slot, outlook(starts, cell, before=before, now=now, lacks=lacks))

    def _comes_back(self, rank: int, job: JobSpec | None) -> bool:
        """Whether ``rank``, if it has not died but was told to leave, starts again by itself."""
        return self._config.respawn > 0 or (job is not None and rank // job.cell_size in self._awake)

    def _wake(self, worker: int, cell_size: int, now_s: float) -> None:
        """Have the ranks of ``worker`` start that have left with it, now and from now on."""
        self._awake.add(worker)
        left = self._left.intersection(numbers(worker, cell_size))
        self._left -= left
        self._due.extend((now_s, rank) for rank in sorted(left))

    def _has_next(self, rank: int) -> bool:
        """Whether another agent has started a process of ``rank``: this agent stood still meanwhile, and is to end."""
        known = self._incarnations.get(rank, first_incarnation())
        with contextlib.suppress(ValueError):
            said = self._control.peek(keys.here_key(rank)) or ""
            return said.partition("/")[0] not in ("", str(known))
        return False

    def _complete(self, now_s: float, cell_size: int) -> None:
        """Complete a broken cell: start its missing ranks in the places of another broken cell, if those suffice."""
        moves, grown = self._places.complete(cell_size, self._training(cell_size))
        for move in moves:
            self._start_in_place(move, now_s)
            self._wake(move.missing // cell_size, cell_size, now_s)
        if grown is not None:
            self._control.put(keys.places_key(grown), "0")

    def _training(self, cell_size: int) -> dict[int, int]:
        """Return worker -> its number of ranks, for the smaller cells all of whose processes run.

        Such a cell may train, and alone have some layers, also when it is to be whole: until it leaves for that.
        """
        found = Counter[tuple[int, int]]()
        for slot, size in self._running.items():
            rank = self._places.rank_in(slot)
            if size and rank is not None and slot not in self.wanted:
                found[rank // cell_size, size] += 1
        return {worker: size for (worker, size), running in found.items() if running == size}

    def _arrange(self, rank: int) -> None:
        """Have the cell of ``rank`` come back in the shape that is wanted, if that is why it has left."""
        job = _job(self._control)
        if job is None or job.cell_size == 1:
            return
        worker, size = rank // job.cell_size, job.cell_size
        text = self._control.peek(keys.comes_back_key(worker)) or ""
        if not text or text == self._carried_out.get(worker):
            return
        self._carried_out[worker] = text
        wanted, living = from_json(ComesBack, text), self._places.living(worker, size)
        if not wanted.without:
            if self._places.take_back(worker, size):
                self._control.put(keys.places_key(worker), "0")
            return
        known = tuple(self._incarnations.get(one, first_incarnation()) for one in living)
        running = all(one == rank or self._places.slot(one) in self._running for one in living)
        if known != wanted.incarnations or not running or not self._places.is_all_here(worker, size):
            return  # the cell has lost a rank before it could leave, and comes back as it was
        if left := self._places.set_aside(worker, wanted.without, job.cell_sizes):
            self._control.put(keys.places_key(worker), str(left))
            ranks = list(numbers(worker, size)[:left])
            self._journal.event("cell_shrinks", ranks=ranks, whole=size, echo=True)

    def _shrink(self, now_s: float, job: JobSpec, worker: int) -> None:
        """Have what is left of ``worker`` go on as a smaller cell, if it has to be another one than it is."""
        ranks = numbers(worker, job.cell_size)
        if not self._shrinks:
            return
        size = self._places.can_shrink(worker, job.cell_sizes)
        living = self._places.living(worker, job.cell_size)
        if self._places.too_few(worker, job.cell_sizes):
            self._control.put(keys.places_key(worker), "0")
        why = job.whole_cells_only or job.whole_shards_only
        if why and living and len(living) < min(job.cell_sizes):
            waits = "stand by" if self._comes_back(ranks[0], job) else "have left"
            say(
                f"[odyssey] ranks {living} of {list(ranks)} {waits}, and do not go on as a smaller cell: {why}"
            )
        if not size or not self._places.is_all_here(worker, job.cell_size):
            return
        self._control.put(keys.places_key(worker), str(size))
        self._wake(worker, job.cell_size, now_s)
        for move in self._places.shrink(worker, job.cell_sizes):
            self._start_in_place(move, now_s)
        left = list(ranks[:size])
        self._journal.event("cell_shrinks", ranks=left, whole=job.cell_size, echo=True)
        rest = self._places.living(worker, job.cell_size)[size:]
        if rest and job.even_gangs_only:
            say(
                f"[odyssey] ranks {rest} stand by, as a gang of this job goes on only with as many ranks as divide "
                f"{job.cell_size}: {job.even_gangs_only}"
            )

    def _start_in_place(self, move: Move, now_s: float) -> None:
        """Start the missing rank in place of the spare, as soon as the process of the spare, if any, has ended."""
        self._due = [one for one in self._due if one[1] != move.spare]
        self._left.discard(move.spare)
        if move.slot in self._running:
            self.wanted.add(move.slot)
        self._due.append((now_s, move.missing))
        self._lives.moves(move.missing)
        self._journal.event("place_taken", target=move.missing, spare=move.spare, echo=True)

    def due(self, now_s: float) -> list[tuple[int, int]]:
        """Return (rank, slot) of each rank that is to be started now."""
        ready = [
            one for one in self._due if one[0] <= now_s and self._places.slot(one[1]) not in self._running
        ]
        self._due = [one for one in self._due if one not in ready]
        return [(rank, self._places.slot(rank)) for _, rank in ready]

    def begin(self, rank: int, slot: int, now_s: float) -> tuple[int, int]:
        """Note that a process of ``rank`` begins in ``slot``; return the number of its log, and its incarnation."""
        number, missed = self._lives.start(rank, now_s)
        self._incarnations[rank] = missed + first_incarnation()
        self._running[slot] = self._smaller_size(rank)
        return number, self._incarnations[rank]

    def start(self, rank: int, slot: int) -> tuple[Any, int]:
        """Start a process of ``rank`` with the environment of ``slot``; return it and its incarnation.

        Raises:
            OSError: This node has no room for it; see :meth:`put_off`.
        """
        context = self._context
        number, incarnation = self.begin(rank, slot, time.monotonic())
        logs = [
            f"{path}.{number}" if path else None for path in (context.stdouts[slot], context.stderrs[slot])
        ]
        names = {
            "RANK": str(rank),
            "ODYSSEY_INCARNATION": str(incarnation),
            "ODYSSEY_CELL_SIZE": str(self._running[slot]),
        }
        with forking(self._zygote):
            handler = multiprocessing_api.get_subprocess_handler(
                entrypoint=context.entrypoint,
                args=context.args[slot],
                env={**context.envs[slot], **names},
                stdout=logs[0] or "",
                stderr=logs[1] or "",
                local_rank_id=slot,
                numa_options=context._numa_options,  # --numa-binding holds for later processes, too
            )
        process = handler.proc
        self._put_off.discard(rank)
        self._journal.event("rank_started", target=rank, pid=process.pid, host=host_name(), echo=True)
        return process, incarnation

    def put_off(self, rank: int, slot: int, why: OSError, now_s: float) -> None:
        """Start ``rank``, which could not be started in ``slot`` now, later. This uses up none of its starts."""
        self._running.pop(slot, None)
        self._lives.never_began(rank)
        self._due.append((now_s + AT_MOST_S, rank))
        if rank not in self._put_off:
            say(
                f"[odyssey] rank {rank} cannot be started again: {why.strerror}. The job goes on without it; this is "
                f"tried again every {AT_MOST_S:.0f} s. Make room on {host_name()}: for files (ulimit -Hn), for "
                "processes and threads (ulimit -Hu, pids.max of the cgroup), or in its memory."
            )
        self._put_off.add(rank)

    def _smaller_size(self, rank: int) -> int:
        job = _job(self._control) if self._places.has_smaller else None
        return 0 if job is None else self._places.size_of(rank, job.cell_size)
