"""Agents wait for each other before ranks are numbered, and say for whom: torch's own wait is silent, and ends with a
traceback.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from odyssey_megatron.errors import ConfigError

_LOOK_S = 0.2
_SAY_AFTER_S, _SAY_EVERY_S = 15.0, 60.0
_NOT_THERE = (
    "node(s) {missing} of {nodes} have not come within {limit_s:.0f} s. Start 'odyssey run' on each, with its "
    "--node-rank and the same --nnodes and --master-addr; what it prints there says why it could not come."
)


def wait_for_all(store: Any, node: int, nodes: int, limit_s: float, say: Callable[[str], None]) -> None:
    """Until all ``nodes`` are there, of which this is ``node``. Raises ConfigError, with those that are not."""
    keys = [f"odyssey/there/{one}" for one in range(nodes)]
    store.set(keys[node], "")
    began_s = time.monotonic()
    says_s = began_s + _SAY_AFTER_S
    while not store.check(keys):
        now_s = time.monotonic()
        if now_s >= min(says_s, began_s + limit_s):
            absent = [one for one, key in enumerate(keys) if not store.check([key])]
            missing = ", ".join(map(str, absent))
            if absent and now_s >= began_s + limit_s:
                raise ConfigError(_NOT_THERE.format(missing=missing, nodes=nodes, limit_s=limit_s))
            if absent and all(one in absent for one in range(node)):  # one says so
                say(f"[odyssey] waiting for node(s) {missing} of {nodes}, for {now_s - began_s:.0f} s now.")
            says_s = now_s + _SAY_EVERY_S
        time.sleep(_LOOK_S)
