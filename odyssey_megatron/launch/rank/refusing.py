"""Prints an error that all ranks have before they join the job only once."""

from __future__ import annotations

import os
import sys

from odyssey_megatron.errors import ConfigError, ControlPlaneLost
from odyssey_megatron.launch.rank import environment


def say(why: str) -> None:
    """Report ``why`` this process ends with EXIT_BAD_INPUT. The launcher prints it for the first rank that reports one.

    A process that is no rank, or would join a running job, prints it itself.
    """
    if not _posted(why):
        sys.stderr.write(f"error: {why}\n")


def _posted(why: str) -> bool:
    if os.environ.get("ODYSSEY_INCARNATION", "0") != "0":
        return False
    from odyssey_megatron.launch.wire import control as keys  # it needs torch, which a rank of a launcher has

    try:
        env = environment.of_rank()
        control = keys.Control.connect(
            env["MASTER_ADDR"], int(env["MASTER_PORT"]), env["ODYSSEY_TOKEN"], writer=f"rank{env['RANK']}"
        )
        control.put_first(keys.REFUSED, why)
    except (ConfigError, ControlPlaneLost, TimeoutError, ValueError):
        return False
    return True
