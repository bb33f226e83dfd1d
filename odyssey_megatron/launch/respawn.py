"""Dead ranks of a node that are started again: anew if the job has not begun, else they join it.

A rank that is killed before it has met any other, and before there is a plan, is missed by nobody: it is started once
more in its own place, with ``--odyssey-respawn`` or without. The others wait for all ranks then, and go on waiting.

A rank that has used up its starts is lost for good, and with it its GPU as far as this agent can tell. What is left of
its cell joins again as a smaller cell of as many ranks as divide a whole one, where the job allows that; what is over
stands by: processes that join, and wait for the rest of their cell. With two broken cells on a node, one can be
completed: its missing rank is started where a rank of the other stood by. For the job that is a rank that
comes back; only the agent knows that it came back in another place. A smaller cell is the first ranks of its worker,
whichever of them are lost: its processes start in the places of those that are left.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import api as multiprocessing_api

from odyssey_megatron.cluster.cell import NO_SHAPES, Cell, ranks_that_go_on
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import from_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import EXIT_ALIKE, EXIT_BAD_INPUT, EXIT_FENCED, EXIT_LEFT_OUT, EXIT_UNSOUND
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.control import Control
from odyssey_megatron.launch.forking import forking
from odyssey_megatron.launch.signals import HANDLED
from odyssey_megatron.launch.zygote import Zygote
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.metrics.outlet import say

_AFTER_S, _AT_MOST_S = 0.5, 8.0
"""Before a rank is started again; twice as long after each short life, up to a limit."""
_SHORT_LIFE_S = 10.0
_ANEW = 3
"""So often a rank is started anew before the job begins: what kills it each time is to be seen by the user."""


def completed(
    slots: Mapping[int, int], lost: Sequence[int], cell_size: int, smaller: Mapping[int, int] = NO_SHAPES
) -> dict[int, int]:
    """Missing rank -> the slot to start it in, so that one broken cell is whole again; empty where that cannot be.

    The cell that lacks fewest is completed, from those that lack most; what trains in a smaller cell stays there, and
    of two that lack as many the one that trains not at all comes first.

    Args:
        slots: rank -> slot, of the ranks that have one.
        lost: ranks that have none any more, and miss it.
        cell_size: ranks of a cell.
        smaller: worker -> places that each rank fills, of those that train as smaller cells.
    """
    broken: dict[int, list[int]] = {}
    for rank in sorted(lost):
        broken.setdefault(Cell(rank=rank, size=cell_size).worker, []).append(rank)
    if not broken:
        return {}
    for whole in sorted(broken, key=lambda worker: (len(broken[worker]), worker in smaller, worker)):
        others = sorted(
            (worker for worker in broken if worker != whole), key=lambda one: (-len(broken[one]), one)
        )
        spares = [
            slots[rank]
            for worker in others
            for rank in _numbers(worker, cell_size)[
                cell_size // smaller[worker] if worker in smaller else 0 :
            ]
            if rank in slots
        ]
        if len(spares) >= len(broken[whole]):
            return dict(zip(broken[whole], spares, strict=False))
    return {}


def shrunk(slots: Mapping[int, int], worker: int, cell_size: int) -> tuple[int, dict[int, int]]:
    """How many places of a whole cell each rank of ``worker`` fills with what is left of it, 0 if nothing is; and which
    ranks start in the places of which others, so that the first ones are there.

    Args:
        slots, cell_size: as in :func:`completed`.
    """
    numbers = _numbers(worker, cell_size)
    left = [rank for rank in numbers if rank in slots]
    size = ranks_that_go_on(cell_size, len(left))
    if not size:
        return 0, {}
    lacking = [rank for rank in numbers[:size] if rank not in slots]
    return cell_size // size, dict(zip(lacking, reversed(left), strict=False))


def _numbers(worker: int, cell_size: int) -> range:
    return Cell(rank=worker * cell_size, size=cell_size).numbers(worker)


def forget_smaller(control: Control, ranks: Sequence[int]) -> None:
    """The cells of ``ranks`` begin as whole ones: their node is a new one, which has lost none."""
    if (job := _job(control)) is not None:
        for worker in {rank // job.cell_size for rank in ranks}:
            control.put(keys.places_key(worker), "1")


def _job(control: Control) -> JobSpec | None:
    """None before its ranks have said what it is."""
    if not control.has([keys.JOB]):
        return None
    return from_json(JobSpec, json.loads(control.get(keys.JOB))["job"])


class Respawn:
    """The ranks of a node that are to be started again: in a job that runs each ``config.respawn`` times at most."""

    def __init__(
        self,
        context: Any,
        control: Control,
        config: OdysseyConfig,
        zygote: Zygote | None,
        journal: Journal,
    ):
        """``context``: torch elastic's, of the processes that were started first."""
        self._context, self._control, self._zygote, self._journal = context, control, zygote, journal
        self._limit, self._anew_within_s = config.respawn, config.store_timeout_s
        self._shrinks = config.shrink == "auto"
        self._world_size = int(next(iter(context.envs.values()))["WORLD_SIZE"])
        self._slots = {int(env["RANK"]): slot for slot, env in context.envs.items()}
        """rank -> slot; not of those that are lost for good."""
        self._began_with = frozenset(self._slots)
        self._smaller: dict[int, int] = {}
        """Worker -> places of a whole cell that each of its ranks fills, of those that go on as smaller cells."""
        self._lost: list[int] = []
        self.wanted: set[int] = set()
        """Slots whose processes must end, for another rank."""
        self._starts: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._made_s, self._began_s = time.monotonic(), dict[int, float]()
        self._anew: dict[int, int] = {}
        """Of each rank, how many of its processes the job has not missed."""
        self._unmissed: set[int] = set()
        """Those that have died so, and are due."""
        self._wrong: set[int] = set()
        """Slots in which a rank's numbers were wrong."""
        self._short: dict[int, int] = {}
        """Of each rank, how many processes in a row ended soon."""
        self._due: list[tuple[float, int]] = []

    def unmissed(self, rank: int, code: int) -> bool:
        """Whether nobody has to hear that ``rank`` has ended with ``code``: before the job begins it starts anew."""
        tries = self._anew.get(rank, 0)
        life_s = time.monotonic() - self._began_s.get(rank, self._made_s)
        # A script that joins no job would seem to be at its beginning for ever.
        if code >= 0 or -code in HANDLED or tries >= _ANEW or life_s > self._anew_within_s:
            return False
        planned = self._control.has([keys.digest_key(one) for one in range(self._world_size)])
        if planned or self._control.has([keys.met_key(rank)]):
            return False
        self._anew[rank] = tries + 1
        self._unmissed.add(rank)
        say(
            f"[odyssey] rank {rank} was ended by signal {-code} before the job began: it is started anew ({tries + 1} "
            f"of at most {_ANEW} times)."
        )
        return True

    def note_end(self, rank: int, slot: int, code: int, now_s: float) -> None:
        """``rank`` ended in ``slot``. Not started again: one that has finished, was refused, has died too often, or
        whose numbers were wrong twice.
        """
        self._control.put(keys.here_key(rank), "")
        if slot in self.wanted:
            self.wanted.discard(slot)
            return  # whoever wants it is due
        if rank in self._unmissed:
            self._unmissed.discard(rank)
            self._due.append((now_s + _AFTER_S, rank))
            return
        if not self._limit or code in (0, EXIT_ALIKE, EXIT_BAD_INPUT, EXIT_UNSOUND):
            return
        left = self._left.get(rank, self._limit)
        if code == EXIT_LEFT_OUT and slot in self._wrong:
            say(f"[odyssey] rank {rank} was left out for wrong numbers before: it is not started again")
            left = 0
        if code == EXIT_LEFT_OUT:
            self._wrong.add(slot)
        if left > 0 or code == EXIT_FENCED:  # which says nothing against the rank itself
            self._left[rank] = left - (code != EXIT_FENCED)
            # What failed at once may well fail at once again.
            soon = now_s - self._began_s.get(rank, 0.0) < _SHORT_LIFE_S
            self._short[rank] = self._short.get(rank, 0) + 1 if soon else 0
            self._due.append((now_s + min(_AT_MOST_S, _AFTER_S * 2 ** self._short[rank]), rank))
            return
        del self._slots[rank]
        self._lost.append(rank)
        job = _job(self._control)
        if job is None:
            return
        self._complete(now_s, job.cell_size)
        for worker in sorted({Cell(rank=one, size=job.cell_size).worker for one in self._lost}):
            self._shrink(now_s, job, worker)

    def _complete(self, now_s: float, cell_size: int) -> None:
        """Starts what a broken cell lacks in the place of ranks of another one, if they are enough."""
        found = completed(self._slots, self._lost, cell_size, self._smaller)
        ranks = {slot: rank for rank, slot in self._slots.items()}
        for missing, slot in found.items():
            self._start_in_place(missing, ranks[slot], now_s)
            worker = Cell(rank=missing, size=cell_size).worker
            if self._smaller.pop(worker, 0):
                self._control.put(keys.places_key(worker), "1")

    def _start_in_place(self, missing: int, spare: int, now_s: float) -> None:
        """``missing`` starts where ``spare`` is, which is lost in its stead."""
        slot = self._slots.pop(spare)
        self._slots[missing] = slot
        self._lost[self._lost.index(missing)] = spare
        waits = [one for one in self._due if one[1] == spare]
        self._due = [one for one in self._due if one[1] != spare]
        if not waits:
            self.wanted.add(slot)
        self._due.append((now_s, missing))
        self._left[missing], self._short[missing] = self._limit, 0
        self._journal.event("place_taken", target=missing, spare=spare, echo=True)

    def _shrink(self, now_s: float, job: JobSpec, worker: int) -> None:
        """What is left of ``worker`` goes on as a smaller cell, if it has to be another one than it is."""
        numbers = _numbers(worker, job.cell_size)
        each, moves = shrunk(self._slots, worker, job.cell_size)
        if not self._shrinks or not each or each == self._smaller.get(worker, 1) or job.whole_cells_only:
            if each and self._shrinks and job.whole_cells_only:
                say(
                    f"[odyssey] what is left of ranks {list(numbers)} stands by, and does not go on as a smaller "
                    f"cell: {job.whole_cells_only}"
                )
            return
        if not self._began_with.issuperset(numbers):
            return  # on several nodes, whose agents know of their own ranks only
        self._smaller[worker] = each
        self._control.put(keys.places_key(worker), str(each))
        for missing, spare in moves.items():
            self._start_in_place(missing, spare, now_s)
        ranks = list(numbers[: job.cell_size // each])
        self._journal.event("cell_shrinks", ranks=ranks, whole=job.cell_size, echo=True)

    def due(self, now_s: float) -> list[tuple[int, int]]:
        """(rank, slot) of those whose time has come."""
        ready = [one for one in self._due if one[0] <= now_s and self._slots[one[1]] not in self.wanted]
        self._due = [one for one in self._due if one not in ready]
        return [(rank, self._slots[rank]) for _, rank in ready]

    def start(self, rank: int, slot: int) -> Any:
        """The new process, with the environment of ``slot``."""
        context, number = self._context, self._starts.get(rank, 0) + 1
        self._starts[rank], self._began_s[rank] = number, time.monotonic()
        incarnation = number - self._anew.get(rank, 0) + int(os.environ.get("ODYSSEY_INCARNATION", "0"))
        logs = [
            f"{path}.{number}" if path else None for path in (context.stdouts[slot], context.stderrs[slot])
        ]
        names = {
            "RANK": str(rank),
            "ODYSSEY_INCARNATION": str(incarnation),
            "ODYSSEY_PLACES": str(self._places(rank)),
        }
        with forking(self._zygote):
            handler = multiprocessing_api.get_subprocess_handler(
                entrypoint=context.entrypoint,
                args=context.args[slot],
                env={**context.envs[slot], **names},
                stdout=logs[0] or "",
                stderr=logs[1] or "",
                local_rank_id=slot,
                numa_options=None,
            )
        process = handler.proc
        self._journal.event(
            "rank_started", target=rank, pid=process.pid, host=socket.gethostname(), echo=True
        )
        return process

    def _places(self, rank: int) -> int:
        """Of a whole cell, that a new process of ``rank`` fills: one where it stands by."""
        job = _job(self._control) if self._smaller else None
        if job is None:
            return 1
        each = self._smaller.get(rank // job.cell_size, 1)
        return each if rank % job.cell_size < job.cell_size // each else 1
