"""What ranks settle before they train: that they were started for one job, and who does something first."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import to_json
from odyssey_megatron.errors import ConfigError, ControlPlaneLost
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.control import Control
from odyssey_megatron.launch.watch import Watch


class Starting:
    """One rank's part. All methods raise ControlPlaneLost when the store is gone, or others do not come in time."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        incarnation: int,
        control: Control,
        watch: Watch,
        timeout_s: float,
    ):
        self._rank, self._world_size, self._incarnation = rank, world_size, incarnation
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

    def wait(self, names: list[str], what: str) -> None:
        """Until ``names`` are in the store: not every rank has ``what`` before."""
        try:
            self._control.wait(names, self._timeout_s)
        except TimeoutError:
            raise ControlPlaneLost(
                f"rank {self._rank} waited {self._timeout_s} s, but not every rank has {what}. "
                "Look for the first error in the other ranks' logs, or raise --odyssey-store-timeout-s."
            ) from None
