"""``odyssey inject``: send a signal to a rank of a running job, or slow it down, from another shell."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.faults import SIGNALS, SLOWER
from odyssey_megatron.inputs import Between, Parser
from odyssey_megatron.metrics.journal import clock, read_journal

_PERIOD_S = 0.05
"""The period in which a slowed process runs once and stands still once. It is short compared with a step, and with the
time after which a rank seems to hang.
"""
_LEAST_S = 0.002
"""The least time that a slowed process runs at once. If it were shorter, most of it would be spent on waking up."""


def main(argv: list[str]) -> int:
    """Sends a signal to a rank of a running job on this machine, or takes CPU away from it."""
    parser = Parser(prog="odyssey inject", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, help="--odyssey-run-dir of the job")
    parser.add_argument("--rank", type=Between(0, 1_000_000, whole=True), required=True)
    parser.add_argument("--signal", choices=SIGNALS, help="KILL unless --slow is given")
    parser.add_argument(
        "--slow", type=SLOWER, help="it takes so many times its time: stopped and let run by turns"
    )
    parser.add_argument(
        "--for-s", type=Between(0.1, 1e6), help="for so long; else until this command is ended"
    )
    args = parser.parse_args(argv)
    if args.signal and args.slow:
        raise ConfigError("--signal and --slow are two things to do to a rank: leave one of them out.")
    if args.for_s and not args.slow:
        raise ConfigError("--for-s says for how long a rank is slow: give --slow, too.")
    pid = _pid_of(args)
    if args.slow:
        print(f"rank {args.rank} (pid {pid}) runs for 1/{args.slow:g} of the time", flush=True)
        with _reached(args.rank, pid):
            ended = _hold_back(pid, args.slow, args.for_s or math.inf)
        print(f"rank {args.rank} (pid {pid}) " + ("has ended" if ended else "is as fast as before"))
        return 0
    name = args.signal or SIGNALS[0]
    with _reached(args.rank, pid):
        os.kill(pid, getattr(signal, "SIG" + name))
    print(f"sent SIG{name} to rank {args.rank} (pid {pid})")
    return 0


@contextlib.contextmanager
def _reached(rank: int, pid: int) -> Iterator[None]:
    """Raises ConfigError where what the body sends to a rank does not reach it."""
    try:
        yield
    except OSError as error:
        who = " Do it as the user who has started the job." * isinstance(error, PermissionError)
        raise ConfigError(f"rank {rank} (pid {pid}) gets no signal ({error.strerror}).{who}") from None


def _pid_of(args: Namespace) -> int:
    """Return the process id of the rank. Raises ConfigError if the rank does not run on this machine."""
    started = [
        event
        for event in read_journal(args.run_dir, only=("rank_started",))
        if event.get("target") == args.rank and "pid" in event
    ]
    if not started:
        raise ConfigError(
            f"{args.run_dir} has no record of a rank {args.rank}. Name the job's --odyssey-run-dir and one of "
            "its ranks."
        )
    pid = int(started[-1]["pid"])
    elsewhere = started[-1].get("clock", clock()) != clock()
    # Either the rank has ended, and its pid may belong to another process by now; or it runs on another host.
    if elsewhere or _started_s(pid) > started[-1]["t_s"] + 0.1:
        raise ConfigError(
            f"rank {args.rank} of {args.run_dir} is not running on this machine, as far as its journal says: its last "
            f"process (pid {pid}) has ended, or is on another machine. While nothing can be written to the run's "
            "folder, the journal does not know of new processes."
        )
    return pid


def _started_s(pid: int) -> float:
    """Return when process ``pid`` started, on the monotonic clock. Infinite if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.inf
    since_boot_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return since_boot_s - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def _hold_back(pid: int, slow: float, for_s: float) -> bool:
    """Slow process ``pid`` down until it ends, or ``for_s`` have passed, or this process is told to end.

    Returns:
        Whether it has ended.
    """
    runs_s = max(_LEAST_S, _PERIOD_S / slow)
    waits_s, ends_s = runs_s * (slow - 1), time.monotonic() + for_s

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    process = os.pidfd_open(pid)  # unlike the pid it never means a later process
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < ends_s:
                signal.pidfd_send_signal(process, signal.SIGSTOP)
                time.sleep(waits_s)
                signal.pidfd_send_signal(process, signal.SIGCONT)
                time.sleep(runs_s)
        return False
    except ProcessLookupError:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(process, signal.SIGCONT)
        os.close(process)
        signal.signal(signal.SIGTERM, before)
