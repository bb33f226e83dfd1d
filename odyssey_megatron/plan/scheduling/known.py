"""A cache of orders and programs for one set of costs, so that the next decision can look them up.

Failures of one kind lead to equal shapes on other workers. While the job trains, decisions on possible deaths
(``policy/planner.py``) leave here what the decision on a real one needs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

from odyssey_megatron.plan.costs import Costs

if TYPE_CHECKING:
    from odyssey_megatron.plan.scheduling.assemble import Kind
    from odyssey_megatron.plan.scheduling.list_schedule import Solved
    from odyssey_megatron.plan.scheduling.tasks import Shape

_KEPT_BYTES = 24 * 2**20
"""The most bytes of orders, and as many of kinds, that are kept for a set of costs. Beyond that the least recently used
go (I10)."""

K = TypeVar("K")
V = TypeVar("V")


class _Kept(Generic[K, V]):
    """A cache of bounded size, shared by decisions and by their rehearsal in another thread."""

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
    """What is known for one set of costs."""

    def __init__(self) -> None:
        self.orders: _Kept[Shape, Solved] = _Kept()
        """Shape -> its best order, found without a time limit."""
        self.kinds: _Kept[int, tuple[Solved, Kind]] = _Kept()
        """``id()`` of an order -> the order, and its programs, lowered and verified."""


@lru_cache(maxsize=2)
def known(costs: Costs) -> Known:
    """Return what is known for ``costs``.

    Two sets are kept: the costs of current decisions, and those that the next decisions will be made with.
    """
    return Known()
