"""What the ranks measure reaches the planner while the job trains, so that no recovery waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from odyssey_megatron.cluster.state import ClusterState, without_fresh
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.errors import ControlPlaneLost
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.control import Control
from odyssey_megatron.launch.planner import Planner
from odyssey_megatron.plan.plan import Plan

_log = logging.getLogger(__name__)

_AT_ONCE = 256
"""So many values are read in one call: whoever else uses the connection waits for one call at most."""
_EVERY_S = 1.0
_CLOSES_S = 0.5
"""Reading takes less."""
_SHARE = 0.05
"""Of a core, that either may take as long as the plan is the same."""


class _Beside:
    """Work beside the coordinator's, now and then: a thread at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._for: tuple[Plan, bool] | None = None
        self._due_s = 0.0

    def look(self, current: Plan, work: Callable[[], None], *, has_learned: bool = False) -> None:
        """Begins with ``work`` where that is due, or was for another plan, or before anything was measured. Returns at
        once.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        is_same = self._for is not None and self._for[0] is current and self._for[1] == has_learned
        if is_same and time.monotonic() < self._due_s:
            return
        self._for = current, has_learned
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        began_s = time.thread_time()
        try:
            work()
        except ControlPlaneLost:
            return
        except Exception:  # noqa: BLE001 - the job goes on by what was known before
            _log.exception("what the ranks have measured was not taken in. Please report this.")
        finally:
            self._due_s = time.monotonic() + max(_EVERY_S, (time.thread_time() - began_s) / _SHARE)


class Learning:
    """``Planner.learn`` with what the ranks have published, and ``Planner.rehearse``. Who is slow is known within a
    second or two of what shows it, however long it takes to work out the next decisions.
    """

    def __init__(self, planner: Planner, control: Control, world_size: int):
        self._planner, self._control = planner, control
        self._keys = [keys.observations_key(rank) for rank in range(world_size)]
        self._learns, self._rehearses = _Beside("odyssey-learn"), _Beside("odyssey-rehearse")
        self._has_learned = False
        self._reading = threading.Lock()
        self.diagnosis: Diagnosis | None = None
        """By what was read last."""

    def observations(self) -> list[str]:
        """What each rank has published last."""
        found: list[str] = []
        for at in range(0, len(self._keys), _AT_ONCE):
            found += (text for _, text in self._control.latest(self._keys[at : at + _AT_ONCE]))
        return found

    def catch_up(self) -> None:
        """For a decision that comes before anything has been learned: by estimates it could be another one."""
        if not self._has_learned:
            self._planner.adopt(self.observations())

    def close(self) -> None:
        """Before the process ends: nothing more is read. A thread that is in the store's code then would abort it."""
        self._reading.acquire(timeout=_CLOSES_S)

    def look(self, state: ClusterState, current: Plan) -> None:
        """Learns for the next failure of ``current``, where that is due. Returns at once."""
        state = without_fresh(state)
        self._learns.look(current, lambda: self._learn(state, current))
        self._rehearses.look(current, lambda: self._rehearse(state, current), has_learned=self._has_learned)

    def _rehearse(self, state: ClusterState, current: Plan) -> None:
        self._planner.keep()
        self._planner.rehearse(state, current, time.monotonic())

    def _learn(self, state: ClusterState, current: Plan) -> None:
        with self._reading:
            observations = self.observations()
        if any(observations) and not self._has_learned:
            # Working out what the next decisions look up takes seconds, and nobody is to read all this again.
            self._planner.adopt(observations)
            self._has_learned = True
        self.diagnosis = self._planner.learn(state, current, observations, time.monotonic())
