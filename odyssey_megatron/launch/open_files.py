"""How many files and connections a process may have open."""

from __future__ import annotations

import contextlib
import resource

from odyssey_megatron.metrics.outlet import say

_ENOUGH = 2**16
"""More than any job wants; where the hard limit is a billion, programs that look at each number would take minutes."""
_EACH_RANK, _EACH_NODE, _ELSE = 2, 6, 128
"""Connections to the job's store."""
_TOO_FEW = (
    "[odyssey] up to {wanted} files and connections will be open here, where {ranks} ranks of {nodes} node(s) meet; "
    "the limit is {limit}. Raise it before the start (ulimit -Hn, or LimitNOFILE of the service)."
)


def allow_many() -> None:
    """In this process, and in those that it starts: as many as the hard limit has. The soft one, often 1024, is there
    for programs that would break with more, and the store of a job of 500 ranks has as many connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some sandboxes do not let it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_many(ranks: int, nodes: int) -> None:
    """Of who hosts a job with these: says so where its limit is too low."""
    wanted = _EACH_RANK * ranks + _EACH_NODE * nodes + _ELSE
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        say(_TOO_FEW.format(wanted=wanted, ranks=ranks, nodes=nodes, limit=limit))
