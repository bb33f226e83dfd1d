"""Passes what the ranks measure to the planner while the job trains, so that no recovery waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from odyssey_megatron.cluster.state import ClusterState, without_fresh
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.errors import ControlPlaneLost
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.plan.plan import Plan

_log = logging.getLogger(__name__)

_AT_ONCE = 256
"""Number of values that are read in one call; other users of the connection wait for one call at most."""
_EVERY_S = 1.0
_CLOSES_S = 0.5
"""Seconds that closing waits for a thread that reads; reading takes less."""
_SHARE = 0.05
"""Share of a core that each of the two threads may take as long as the plan is the same."""


class _Beside:
    """Work that is done now and then beside the coordinator, in one thread at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._for: tuple[Plan, tuple[object, ...]] | None = None
        self._due_s = 0.0

    def look(self, current: Plan, work: Callable[[], None], *known: object) -> None:
        """Start ``work`` if it is due, or was last done for another plan or with other things ``known``. Return at
        once.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        is_same = self._for is not None and self._for[0] is current and self._for[1] == known
        if is_same and time.monotonic() < self._due_s:
            return
        self._for = current, known
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
    """Calls ``Planner.learn`` with what the ranks have published, and ``Planner.rehearse``, each in a thread.

    So a slow worker is known within a second or two of what shows it, however long it takes to work out the next
    decisions.
    """

    def __init__(self, planner: Planner, control: Control, world_size: int):
        self._planner, self._control = planner, control
        self._keys = [keys.observations_key(rank) for rank in range(world_size)]
        self._learns, self._rehearses = _Beside("odyssey-learn"), _Beside("odyssey-rehearse")
        self._has_learned = False
        self._reading = threading.Lock()
        self.diagnosis: Diagnosis | None = None
        """The diagnosis of what was read last."""

    def observations(self) -> list[str]:
        """Return what each rank has published last."""
        found: list[str] = []
        for at in range(0, len(self._keys), _AT_ONCE):
            found += (text for _, text in self._control.latest(self._keys[at : at + _AT_ONCE]))
        return found

    def catch_up(self) -> None:
        """Have a decision that comes before anything was learned go by measurements: by estimates it could differ."""
        if not self._has_learned:
            self._planner.adopt(self.observations())

    def close(self) -> None:
        """Stop reading before the process ends: a thread in the store's code would abort it then."""
        self._reading.acquire(timeout=_CLOSES_S)

    def look(self, state: ClusterState, current: Plan) -> None:
        """Learn for the next failure under plan ``current``, if that is due. Return at once."""
        state = without_fresh(state)
        self._learns.look(current, lambda: self._learn(state, current))
        # Not their paces, which change with what experts load them with, again and again.
        unlike = [
            (one.worker, one.speed, one.share) for one in state.workers if one.missing or one.speed != 1.0
        ]
        known = (self._has_learned, unlike, state.slow_links, state.slow_sums)
        self._rehearses.look(current, lambda: self._rehearse(state, current), *known)

    def _rehearse(self, state: ClusterState, current: Plan) -> None:
        self._planner.keep()
        self._planner.rehearse(state, current, time.monotonic())

    def _learn(self, state: ClusterState, current: Plan) -> None:
        with self._reading:
            observations = self.observations()
        if any(observations) and not self._has_learned:
            # Rehearsing takes seconds; until it is done, a decision is to have this without reading it again.
            self._planner.adopt(observations)
            self._has_learned = True
        self.diagnosis = self._planner.learn(state, current, observations, time.monotonic())
