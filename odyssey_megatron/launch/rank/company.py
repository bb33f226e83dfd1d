"""How the ranks of one cell meet before any of them holds layers, and stay together with the processes they met."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.events import RankReturned
from odyssey_megatron.errors import ControlPlaneLost, Fenced, JobStopped
from odyssey_megatron.launch.rank.watch import Watch
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control

_LOOKS_EVERY_S = 0.1


class Company:
    """One rank's part in this. Each rank of the cell writes into the store which process of it is here, and which
    processes it has met.
    """

    def __init__(self, *, rank: int, incarnation: int, size: int = 0, control: Control, watch: Watch):
        """``size`` is the number of ranks of the smaller cell that this rank is in; 0: of a whole one."""
        self._rank, self._incarnation, self._size = rank, incarnation, size
        self._own = f"{incarnation}/{size}".removesuffix("/0")
        self._control, self._watch = control, watch

    def meet(self, cell: Cell) -> tuple[int, ...]:
        """Wait until new processes of all ranks of ``cell``, this rank's, are here, and return their incarnations.

        That may take as long as the job; until then this rank stands by. If a smaller cell is training without this
        rank, it reports that it is back.

        Raises:
            ControlPlaneLost: The store is gone.
            JobStopped: The job ended first.
            Fenced: The cell is to have another size, or its node was asked to leave.
        """
        ranks = cell.ranks
        here = [keys.here_key(rank) for rank in ranks]
        self._control.put(keys.here_key(self._rank), self._own)
        returned = False
        while True:
            self._check_size(cell.full)
            said = self._control.read(here) if self._control.has(here) else []
            found = [(one.partition("/")[0], int(one.partition("/")[2] or 0)) for one in said if one]
            complete = len(found) == len(here) and all(size == self._size for _, size in found)
            if complete and not self._leaving(ranks, said) and self._keep(here, said):
                return tuple(int(incarnation) for incarnation, _ in found)
            if not self._size and not returned and any(size for _, size in found):
                returned = True
                self._control.send(RankReturned(rank=self._rank))
            if self._control.has([keys.VERDICT]):
                raise JobStopped("the job finished first", 0)
            if self._watch.lost is not None:
                raise self._watch.lost
            time.sleep(_LOOKS_EVERY_S)

    def _check_size(self, full: int) -> None:
        """Raise Fenced if its cell is to have another number of ranks. ``full``: that of a whole cell."""
        wanted = int(self._control.peek(keys.places_key(self._rank // full)) or 0)
        if self._size != (wanted if self._rank % full < wanted else 0):
            raise Fenced(f"the cell of rank {self._rank} is to have another size")

    def _leaving(self, ranks: Sequence[int], said: Sequence[str]) -> bool:
        """Whether one of ``ranks`` has met other processes than these: it has lost one of them, and is about to end."""
        for rank, own in zip(ranks, said, strict=True):
            met = self._control.peek(keys.company_key(rank)) or ""
            if met.partition(":")[0] == own and met != _company(own, said):
                return True
        return False

    def _keep(self, here: Sequence[str], said: Sequence[str]) -> bool:
        """Write which processes this rank has met; return False if others are here by now.

        It looks again after it has written: of two ranks that do so at once, at least one sees what the other wrote.
        """
        if len(here) > 1:
            met = keys.company_key(self._rank)
            self._control.put(met, _company(self._own, said))
            if self._control.read(here) != said:
                self._control.put(met, "")  # else others would wait for this process to end
                return False
            threading.Thread(target=self._look, args=(here, said), name="odyssey-cell", daemon=True).start()
        return True

    def _look(self, here: Sequence[str], said: Sequence[str]) -> None:
        """End this process if another rank of its cell is replaced before this one holds layers.

        Until then the coordinator does not report such a death, and the new process must meet processes that start
        anew, too.
        """
        while True:
            time.sleep(_LOOKS_EVERY_S)
            if self._watch.settled:
                continue
            with contextlib.suppress(ControlPlaneLost):  # the main thread will notice
                if self._control.read(here) != said:
                    break
        self._watch.end(Fenced(f"rank {self._rank} has lost another rank of its cell"))


def _company(own: str, said: Sequence[str]) -> str:
    return f"{own}:{','.join(said)}"
