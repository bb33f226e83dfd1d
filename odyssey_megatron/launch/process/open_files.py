"""What a process has open from its start: its standard streams, and how many files and connections it may have."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

from odyssey_megatron.metrics.outlet import say

_ENOUGH = 2**16
"""More than any job needs. With a hard limit of a billion, programs that try each descriptor would take minutes."""
_EACH_RANK, _EACH_NODE, _ELSE = 2, 6, 128
"""Number of connections to the job's store, and of other open files."""
_TOO_FEW = (
    "[odyssey] up to {wanted} files and connections will be open here, where {ranks} ranks of {nodes} node(s) meet; "
    "the limit is {limit}. Raise it before the start (ulimit -Hn, or LimitNOFILE of the service)."
)


def open_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that the parent process has closed.

    To be called before anything else is opened: the next connection would get the number of a closed stream, and with
    it all that is printed there, also by C++.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode, is_ours = "w" if number else "r", False
        try:
            os.fstat(number)
        except OSError:
            is_ours = True
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # the lowest number that is free, i.e. this one
        if getattr(sys, name) is None:
            # A script that was started without this stream, and calls us, may have a file of its own at the number.
            setattr(sys, name, open(number, mode, closefd=False) if is_ours else open(os.devnull, mode))


def allow_many() -> None:
    """Raise the soft limit of this process, and of those that it starts, to the hard limit, at most ``_ENOUGH``.

    The soft limit, often 1024, is there for programs that would break with more; the store of a job of 500 ranks has as
    many connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some sandboxes do not allow it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_many(ranks: int, nodes: int) -> None:
    """Warn if the limit of this process is too low to host a job of ``ranks`` on ``nodes``."""
    wanted = _EACH_RANK * ranks + _EACH_NODE * nodes + _ELSE
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        say(_TOO_FEW.format(wanted=wanted, ranks=ranks, nodes=nodes, limit=limit))
