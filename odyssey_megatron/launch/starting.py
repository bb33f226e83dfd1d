"""What ranks settle before they train: that they were started for one job, and who does something first."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence

from odyssey_megatron.cluster.events import RankReturned
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import to_json
from odyssey_megatron.errors import ConfigError, ControlPlaneLost, Fenced, JobStopped
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.control import Control
from odyssey_megatron.launch.watch import Watch

_MEETING_S = 0.1


class Starting:
    """One rank's part. All methods raise ControlPlaneLost when the store is gone, or others do not come in time."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        incarnation: int,
        each: int = 1,
        control: Control,
        watch: Watch,
        timeout_s: float,
    ):
        """``each``: places of a whole cell that this rank fills."""
        self._rank, self._world_size, self._incarnation = rank, world_size, incarnation
        self._each = each
        self._control, self._watch, self._timeout_s = control, watch, timeout_s

    def post_job(self, job: JobSpec, profile_json: str) -> None:
        """Tells the coordinator what to plan for. Collective.

        Raises:
            ConfigError: the ranks disagree, so they were not started with the same arguments.
        """
        text = to_json({"job": to_json(job), "profile": profile_json})
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self._incarnation:
            if self._control.get(keys.digest_key(0)) != digest:
                raise ConfigError(
                    f"rank {self._rank} was not started for the job that it would join: its model, batch or profile "
                    "differ. Use the arguments that the job was started with."
                )
            return
        self._control.put(keys.observations_key(self._rank), "")
        if self._rank == 0:
            self._control.put(keys.JOB, text)
        self._control.put(keys.digest_key(self._rank), digest)
        everyone = [keys.digest_key(rank) for rank in range(self._world_size)]
        self.wait(everyone, "posted its job")
        differ = [rank for rank, key in enumerate(everyone) if self._control.get(key) != digest]
        if differ:
            raise ConfigError(
                f"the ranks were not started for the same job: the model, batch and profile of rank(s) "
                f"{differ} differ from those of rank {self._rank}. Use the same arguments and the same "
                "--odyssey-profile file on all nodes."
            )

    def wait_all(self, name: str) -> None:
        """A barrier over all ranks of the start, once a ``name``. Nobody waits for a rank that has died."""
        if self._incarnation:
            return
        done, ends_s = f"barrier/{name}", time.monotonic() + self._timeout_s
        if self._control.count(f"{done}/count") == self._world_size:
            self._control.put(done, "")
        while not self._control.has([done]):
            if self._watch.newer_than(1):
                return
            if time.monotonic() > ends_s:
                self.wait([done], f"reached barrier {name!r}")
            time.sleep(0.005)

    @contextlib.contextmanager
    def rank_zero_first(self, name: str = "rank-zero-first") -> Iterator[None]:
        """Runs the body on rank 0, then on all others: for what rank 0 leaves behind on disk."""
        if self._rank != 0:
            self.wait([name], "prepared the data set")
        yield
        if self._rank == 0:
            self._control.put(name, "")

    def meet(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Waits until new processes of all ``ranks``, the cell of this one, are here; their incarnations.

        That may take as long as the job: until then this rank stands by.

        A rank that its worker does without, as what is left of its cell trains, says that it is back.

        Raises:
            JobStopped: the job ended first.
            Fenced: the cell is to have another size.
        """
        here, full, each = [keys.here_key(rank) for rank in ranks], len(ranks) * self._each, self._each
        own = f"{self._incarnation}/{each}".removesuffix("/1")
        self._control.put(keys.company_key(self._rank), "")
        self._control.put(keys.here_key(self._rank), own)
        places, returned = keys.places_key(self._rank // full), False
        while True:
            wanted = int(self._control.peek(places) or 1)
            if each != (wanted if self._rank % full < full // wanted else 1):
                raise Fenced(f"the cell of rank {self._rank} is to have another size")
            said = self._control.read(here) if self._control.has(here) else []
            found = [(one.partition("/")[0], int(one.partition("/")[2] or 1)) for one in said if one]
            complete = len(found) == len(here) and all(one == each for _, one in found)
            if complete and not self._leaving(ranks, said):
                if len(here) > 1:
                    self._control.put(keys.company_key(self._rank), _company(own, said))
                    args = (here, said)
                    threading.Thread(
                        target=self._keep_company, args=args, name="odyssey-cell", daemon=True
                    ).start()
                return tuple(int(incarnation) for incarnation, _ in found)
            if each == 1 and not returned and any(one > 1 for _, one in found):
                returned = True
                self._control.send(RankReturned(rank=self._rank))
            if self._control.has([keys.VERDICT]):
                raise JobStopped("the job finished first", 0)
            time.sleep(_MEETING_S)

    def _leaving(self, ranks: Sequence[int], said: Sequence[str]) -> bool:
        """Whether one of them has met others than these: it has lost one of its cell, and has yet to end of it."""
        for rank, own in zip(ranks, said, strict=True):
            met = self._control.peek(keys.company_key(rank)) or ""
            if met.partition(":")[0] == own and met != _company(own, said):
                return True
        return False

    def _keep_company(self, here: Sequence[str], said: Sequence[str]) -> None:
        """Until this rank holds something the coordinator does not say that one of its cell has died. Whoever comes in
        its place must meet a process that starts anew, too.
        """
        while True:
            time.sleep(_MEETING_S)
            if self._watch.settled:
                continue
            with contextlib.suppress(ControlPlaneLost):  # the main thread will notice
                if self._control.read(here) != said:
                    break
        self._watch.end(Fenced(f"rank {self._rank} has lost another rank of its cell"))

    def wait(self, names: list[str], what: str) -> None:
        """Until ``names`` are in the store: not every rank has ``what`` before."""
        try:
            self._control.wait(names, self._timeout_s)
        except TimeoutError:
            raise ControlPlaneLost(
                f"rank {self._rank} waited {self._timeout_s} s, but not every rank has {what}. "
                "Look for the first error in the other ranks' logs, or raise --odyssey-store-timeout-s."
            ) from None


def _company(own: str, said: Sequence[str]) -> str:
    return f"{own}:{','.join(said)}"
