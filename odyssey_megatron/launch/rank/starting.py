"""What ranks agree on before they train: that they were started for one job, and that rank 0 does some work first."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import NoReturn

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import to_json
from odyssey_megatron.errors import ConfigError, ControlPlaneLost
from odyssey_megatron.launch.rank.watch import Watch
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.names import first_few

_AT_ONCE = 256
"""Number of values that are read in one message; see ``control.py`` for long ones."""
_NAMED = 4
"""The largest number of settings that a message names."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
"""Seconds between two looks at the store. Without them, a thousand ranks that wait for the last one would keep it
busy.
"""


class Starting:
    """One rank's part in the start. All methods raise ControlPlaneLost if the store is gone or other ranks are late."""

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

    def post_job(self, job: JobSpec, profile_json: str, settings: Mapping[str, str] | None = None) -> None:
        """Tell the coordinator what to plan for. Collective.

        Args:
            settings: what else has to be the same on all ranks, or their numbers would differ; by name.

        Raises:
            ConfigError: The ranks disagree, so they were not started with the same arguments.
        """
        text = to_json({"job": to_json(job), "profile": profile_json, "settings": dict(settings or {})})
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self._incarnation:
            if self._control.get(keys.digest_key(0)) != digest:
                raise ConfigError(
                    f"rank {self._rank} was not started for the job that it would join: here and there "
                    f"{_differences(text, self._control.get(keys.JOB))}. Use the arguments that the job was started "
                    "with."
                )
            return
        self._control.put(keys.observations_key(self._rank), "")
        if self._rank == 0:
            self._control.put(keys.JOB, text)
        self._control.put(keys.digest_key(self._rank), digest)
        everyone = [keys.digest_key(rank) for rank in range(self._world_size)]
        self.wait(everyone, "rank(s) {missing} have not said what they train")
        digests = self._read(everyone)
        if differ := [rank for rank, one in enumerate(digests) if one != digests[0]]:
            if self._rank == differ[0]:
                self._control.put(keys.OTHER_JOB, text)
            self.wait([keys.OTHER_JOB], f"rank {differ[0]}, whose job differs, has not said how")
            few, more = first_few(differ)
            how = _differences(self._control.get(keys.OTHER_JOB), self._control.get(keys.JOB))
            raise ConfigError(
                f"the ranks were not started for the same job: on rank(s) {few}{more} and on rank 0 {how}. Use "
                "the same arguments, data and --odyssey-profile file on all nodes."
            )

    def _read(self, names: list[str]) -> list[str]:
        """Read ``names`` in few messages: all ranks do so at once, and one by one 1024 ranks would read a million."""
        parts = (names[at : at + _AT_ONCE] for at in range(0, len(names), _AT_ONCE))
        return [text for part in parts for text in self._control.read(part)]

    def wait_all(self, name: str) -> None:
        """A barrier over all ranks of the start, once per ``name``. It does not wait for a rank that has died."""
        if self._incarnation:
            return
        done, ends_s, pause_s = f"barrier/{name}", time.monotonic() + self._timeout_s, _PAUSE_S
        if self._control.count(f"{done}/count") == self._world_size:
            self._control.put(done, "")
        while not self._control.has([done]):
            if self._watch.newer_than(1):
                return
            if time.monotonic() > ends_s:
                self._give_up(f"not every rank has reached barrier {name!r}")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def rank_zero_first(self, name: str = "rank-zero-first") -> Iterator[None]:
        """Run the body on rank 0, then on all others: for files that rank 0 leaves on disk."""
        if self._rank != 0:
            self.wait([name], "rank 0 has not prepared the data set")
        yield
        if self._rank == 0:
            self._control.put(name, "")

    def wait(self, names: list[str], what: str) -> None:
        """Wait until all ``names`` are in the store.

        Args:
            what: The error if they do not come in time; ``{missing}`` in it becomes the indices of the missing names.
        """
        try:
            self._control.wait(names, self._timeout_s)
        except TimeoutError:
            few, more = first_few([at for at, name in enumerate(names) if not self._control.has([name])])
            self._give_up(what.format(missing=f"{few}{more}"))

    def _give_up(self, what: str) -> NoReturn:
        raise ControlPlaneLost(
            f"rank {self._rank} waited {self._timeout_s:g} s, but {what}. Look for the first error in the other ranks' "
            "logs, or raise --odyssey-store-timeout-s."
        )


def _differences(one: str, other: str) -> str:
    """Return in words what differs between two texts that :meth:`Starting.post_job` has made."""
    posted = json.loads(one), json.loads(other)
    ours, theirs = (json.loads(each["job"]) | each["settings"] for each in posted)
    names = [name for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)]
    if not names:
        return "the profiles differ"
    said = [f"{name} is {ours.get(name)} and {theirs.get(name)}" for name in names[:_NAMED]]
    return ", ".join([*said, *(["and more differ"] if len(names) > _NAMED else [])])
