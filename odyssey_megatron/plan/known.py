"""What has been worked out for one set of costs, so that the next decision looks it up.

Failures of one kind lead to equal shapes on other workers: deaths that are decided on while the job trains
(``policy/planner.py``) leave here what the decision on a real one needs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

from odyssey_megatron.plan.costs import Costs

if TYPE_CHECKING:
    from odyssey_megatron.plan.assemble import Kind
    from odyssey_megatron.plan.list_schedule import Solved
    from odyssey_megatron.plan.tasks import Shape

_KEPT_BYTES = 24 * 2**20
"""Of orders, and of kinds, of each set of costs; beyond, what was not looked up for longest goes (I10)."""

K = TypeVar("K")
V = TypeVar("V")


class _Kept(Generic[K, V]):
    """Values by key, as many as their bytes allow. Decisions, and their rehearsal in another thread, share it."""

    def __init__(self) -> None:
        self._found: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key][0]

    def put(self, key: K, value: V, size_bytes: int) -> None:
        with self._lock:
            self._size += size_bytes - self._found.pop(key, (value, 0))[1]
            self._found[key] = value, size_bytes
            while self._size > _KEPT_BYTES and len(self._found) > 1:
                self._size -= self._found.popitem(last=False)[1][1]


class Known:
    """Of one set of costs."""

    def __init__(self) -> None:
        self.orders: _Kept[Shape, Solved] = _Kept()
        """The best order of a shape, however long it takes."""
        self.kinds: _Kept[int, tuple[Solved, Kind]] = _Kept()
        """The same lowered and verified, by the order's identity."""


@lru_cache(maxsize=2)
def known(costs: Costs) -> Known:
    """Of the costs that decisions are made with, and of those that they will be made with next."""
    return Known()
