"""Wait until the agents of all nodes have come, before any starts its ranks.

torch elastic waits for that within one call of its store: for ten minutes no signal is heeded and nobody is told which
nodes are missing, and at the end there is a traceback.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from odyssey_megatron.errors import ConfigError, ControlPlaneLost
from odyssey_megatron.metrics.outlet import say
from odyssey_megatron.names import first_few

_WITHIN_S = 600.0
"""How long nodes wait for one another. It is torchrun's own limit."""
_LOOK_S, _SAYS_S = 0.1, 30.0
_ALL = "odyssey/came/all"
_STILL = "[odyssey] {who} still missing, of {nodes} nodes. Nothing starts before. Each has a --node-rank of its own."
_NOT_ALL = (
    "not all of {nodes} nodes have come within {limit_s:.0f} s: {who} missing. Start 'odyssey run' there, too, with a "
    "--node-rank of its own, or look in its log for what keeps it; or start the job with fewer nodes."
)


def gather(store: Any, node: int, nodes: int, says: bytes, *, limit_s: float = _WITHIN_S) -> None:
    """Return once the agents of all ``nodes`` have called this, or at once if they had before.

    Args:
        store: torch's store, which all of them use.
        says: What each of torch's agents tells the first one about itself. The first one reads it afterwards without a
            wait, even if that agent has ended meanwhile.

    Raises:
        ConfigError: Some have not come.
        ControlPlaneLost: The store's host is gone.
    """
    began_s = time.monotonic()
    says_s = began_s + _SAYS_S
    try:
        store.set(_came(node), says)
        while not store.check([_ALL]):
            # The first node looks for all of them, and the others only for its answer. So the number of look-ups grows
            # with the number of nodes, and not with its square.
            if node == 0 and store.check([_came(one) for one in range(nodes)]):
                store.set(_ALL, "")
                return
            now_s = time.monotonic()
            if now_s - began_s > limit_s:
                who = _named(_missing(store, nodes))
                raise ConfigError(_NOT_ALL.format(nodes=nodes, limit_s=limit_s, who=who))
            if now_s > says_s:
                says_s = now_s + _SAYS_S
                missing = _missing(store, nodes)
                if node == min({*range(nodes)} - {*missing}):  # all may write into one log
                    say(_STILL.format(who=_named(missing), nodes=nodes))
            time.sleep(_LOOK_S)
    except dist.DistError as error:
        raise ControlPlaneLost(f"the store is gone: {str(error).splitlines()[0]}") from error


def _came(node: int) -> str:
    return f"torchelastic/role_info/{node}"


def _missing(store: Any, nodes: int) -> list[int]:
    """Return the nodes that have not come. If all have, it is the first one, which has not said so and must be gone."""
    return [one for one in range(nodes) if not store.check([_came(one)])] or [0]


def _named(missing: Sequence[int]) -> str:
    if len(missing) == 1:
        return f"node {missing[0]} is"
    few, more = first_few(missing)
    return f"nodes {', '.join(map(str, few))}{more} are"
