"""How ranks of one cell meet before any of them holds something, and keep to those whom they have met."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from odyssey_megatron.cluster.events import RankReturned
from odyssey_megatron.errors import ControlPlaneLost, Fenced, JobStopped
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.control import Control
from odyssey_megatron.launch.watch import Watch

_LOOKS_EVERY_S = 0.1


class Company:
    """One rank's part. Each of the cell says in the store which process of it is here, and whom it has met."""

    def __init__(self, *, rank: int, incarnation: int, each: int = 1, control: Control, watch: Watch):
        """``each``: places of a whole cell that this rank fills."""
        self._rank, self._incarnation, self._each = rank, incarnation, each
        self._own = f"{incarnation}/{each}".removesuffix("/1")
        self._control, self._watch = control, watch

    def meet(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Waits until new processes of all ``ranks``, the cell of this one, are here; their incarnations.

        That may take as long as the job: until then this rank stands by.

        A rank that its worker does without, as what is left of its cell trains, says that it is back.

        Raises:
            ControlPlaneLost: the store is gone.
            JobStopped: the job ended first.
            Fenced: the cell is to have another size, or its node was asked to leave.
        """
        here = [keys.here_key(rank) for rank in ranks]
        self._control.put(keys.here_key(self._rank), self._own)
        returned = False
        while True:
            self._check_size(len(ranks) * self._each)
            said = self._control.read(here) if self._control.has(here) else []
            found = [(one.partition("/")[0], int(one.partition("/")[2] or 1)) for one in said if one]
            complete = len(found) == len(here) and all(each == self._each for _, each in found)
            if complete and not self._leaving(ranks, said) and self._keep(here, said):
                return tuple(int(incarnation) for incarnation, _ in found)
            if self._each == 1 and not returned and any(each > 1 for _, each in found):
                returned = True
                self._control.send(RankReturned(rank=self._rank))
            if self._control.has([keys.VERDICT]):
                raise JobStopped("the job finished first", 0)
            if self._watch.lost is not None:
                raise self._watch.lost
            time.sleep(_LOOKS_EVERY_S)

    def _check_size(self, full: int) -> None:
        """``full``: ranks of a whole cell. Raises Fenced where this one is to fill more of its places, or fewer."""
        wanted = int(self._control.peek(keys.places_key(self._rank // full)) or 1)
        if self._each != (wanted if self._rank % full < full // wanted else 1):
            raise Fenced(f"the cell of rank {self._rank} is to have another size")

    def _leaving(self, ranks: Sequence[int], said: Sequence[str]) -> bool:
        """Whether one of them has met others than these: it has lost one of its cell, and has yet to end of it."""
        for rank, own in zip(ranks, said, strict=True):
            met = self._control.peek(keys.company_key(rank)) or ""
            if met.partition(":")[0] == own and met != _company(own, said):
                return True
        return False

    def _keep(self, here: Sequence[str], said: Sequence[str]) -> bool:
        """Says whom this rank has met, unless that is no longer who is here.

        Looks again after it has said so: of two that do so at once, at least one sees what the other has said.
        """
        if len(here) > 1:
            met = keys.company_key(self._rank)
            self._control.put(met, _company(self._own, said))
            if self._control.read(here) != said:
                self._control.put(met, "")  # nobody is to wait for this one to end
                return False
            threading.Thread(target=self._look, args=(here, said), name="odyssey-cell", daemon=True).start()
        return True

    def _look(self, here: Sequence[str], said: Sequence[str]) -> None:
        """Until this rank holds something the coordinator does not say that one of its cell has died. Whoever comes in
        its place must meet a process that starts anew, too.
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
