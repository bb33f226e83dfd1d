"""The verdict, with which a job ends, and how an agent receives it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from odyssey_megatron.codec import from_json
from odyssey_megatron.errors import (
    EXIT_ALIKE,
    EXIT_AS_ASKED,
    EXIT_BAD_INPUT,
    EXIT_LAYERS_LOST,
    EXIT_NOT_SAVED,
    ControlPlaneLost,
)
from odyssey_megatron.launch.process.signals import HANDLED
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.metrics.outlet import say

_log = logging.getLogger(__name__)

TERMINATE_S = 5.0
"""Seconds from SIGTERM to SIGKILL if a signal was sent to the job, as ranks may have work to do then."""
ENDS_S = 2.0
"""Seconds from SIGTERM to SIGKILL if the job cannot go on. With the time that ranks may take to leave by themselves
this is well below 5 s.
"""
SAYS_WHY = "What it printed before says why; it stands above this line, or in --log-dir with --redirects."
"""Ends the message about a rank that has ended by itself."""
_UNPRINTED = {EXIT_BAD_INPUT: EXIT_BAD_INPUT, EXIT_ALIKE: 1}
"""Exit codes of ranks that leave it to the launcher to print their error, with the job's exit codes."""
_THREAD_ENDS_S = 0.5
"""Seconds from the end of a thread that the agent needs to the end of the job, unless a verdict explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """How the job ends: the coordinator's last message to all agents."""

    code: int
    """Exit code of the job."""
    why: str = ""
    grace_s: float = 0.0
    """Seconds for which an agent lets its ranks go on before it ends them."""
    terminate_s: float = ENDS_S
    """Seconds from SIGTERM to SIGKILL when it ends them."""
    nodes: tuple[int, ...] = ()
    """Nodes that are still there, other than the one that hosts the job."""

    def leaves_s(self, wished_s: float | None) -> float:
        """Return the seconds from SIGTERM to SIGKILL if the user wishes ``wished_s``. A second signal leaves none."""
        return self.terminate_s if wished_s is None or not self.terminate_s else wished_s


def by_signal(verdict: JobVerdict, exits: Mapping[int, int]) -> JobVerdict:
    """Return ``verdict``, or another one if all ranks were ended by a signal: then no hardware was lost.

    Args:
        exits: The exit codes so far, by rank.
    """
    codes = set(exits.values())
    if verdict.code != EXIT_LAYERS_LOST or len(codes) != 1 or -min(codes) not in HANDLED:
        return verdict
    number = signal.Signals(-min(codes))
    why = f"rank(s) {sorted(exits)} were ended by {number.name}, which was sent to them."
    return replace(verdict, code=128 + number, why=f"{why} To end a job, send it to 'odyssey run'.")


def lost_before_training(what: str, *, stranger: bool) -> str:
    """Return in words that the job ends by ``what``. ``stranger``: see :func:`control.is_stranger`."""
    if stranger:  # it may have trained for days
        return f"{what}; the script never joined the job (is --odyssey missing?)."
    return f"{what} before training started. Nothing was trained."


def before_training(
    rank: int, exits: Mapping[int, int], world_size: int, refused: str | None, *, stranger: bool
) -> JobVerdict | None:
    """Return the verdict, if there is one, when a rank has ended before the job began.

    Args:
        rank: The rank that has ended last.
        exits: The exit codes so far, by rank; ``rank`` is among them.
        refused: The message of a rank that refuses to train.
        stranger: See :func:`control.is_stranger`.
    """
    code = exits[rank]
    if code == 0:  # a script that never joins a job: torchrun's rules
        return JobVerdict(code=0) if len(exits) == world_size else None
    if code in _UNPRINTED:
        return JobVerdict(code=_UNPRINTED[code], why=refused or "")
    return JobVerdict(
        code=code if code > 0 else 1,
        why=f"{lost_before_training(f'rank {rank} ended with exit code {code}', stranger=stranger)} {SAYS_WHY}",
    )


def after_training(
    exits: Mapping[int, int],
    cut_short: Collection[int],
    *,
    refused: str,
    ended_behind: int,
    because: str = "",
) -> JobVerdict:
    """Return the verdict on a job whose steps are all committed, or which has ended early, as a signal asked it to.

    Args:
        exits: The exit code of each rank, by rank.
        cut_short: The ranks whose scripts have not come to their end.
        refused: The error with which a rank has ended without printing it, if one has.
        ended_behind: The last iteration, if a signal asked the job to end; else -1.
        because: Why the whole job ends, if the signal asked for less.
    """
    for rank, code in exits.items():
        if code in _UNPRINTED and refused:
            return JobVerdict(code=_UNPRINTED[code], why=refused)
        if code > 0 and not (code == EXIT_NOT_SAVED and ended_behind >= 0):
            why = f"rank {rank} ended with exit code {code} after training. {SAYS_WHY}"
            return JobVerdict(code=code, why=why)
    if killed := [rank for rank, code in exits.items() if code < 0 and rank in cut_short]:
        return JobVerdict(
            code=1,
            why=f"rank(s) {killed} were killed behind the job's last step, but before their scripts had ended: what "
            "these were to write is missing, unless it was written by then.",
        )
    if ended_behind >= 0:
        more = f": {because}" if because else ""
        why = f"the job has ended after iteration {ended_behind}, as a signal asked it to{more}."
        if unsaved := [rank for rank, code in exits.items() if code == EXIT_NOT_SAVED]:
            why += (
                f" Its last checkpoint could not be saved: rank {unsaved[0]} ended with exit code {EXIT_NOT_SAVED}. "
                f"{SAYS_WHY} With --load the job goes on from the checkpoint before, if there is one."
            )
        return JobVerdict(code=EXIT_AS_ASKED, why=why)
    return JobVerdict(code=0)


class VerdictWatch:
    """Waits for the job's verdict in a thread, says its reason, and wakes up a poll of ``fd`` when it arrives.

    An agent must not go on when a thread that it needs has ended, or it would wait for its work for ever. The end of
    such a thread is therefore a verdict, too.
    """

    def __init__(self, control: Control):
        self.value: JobVerdict | None = None
        self.arrived = False
        self.fd = os.eventfd(0)
        self._start("verdict", lambda: self._run(control))

    def lost(self) -> None:
        self.arrived = True
        os.eventfd_write(self.fd, 1)

    def give(self, verdict: JobVerdict) -> None:
        """Set the verdict, unless one has arrived. Whoever gives it has said why."""
        if not self.arrived:
            self.value = verdict
            self.lost()

    def guard(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread whose end is the end of the job."""
        self._start(name, work)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except ControlPlaneLost as error:
                _log.info("%s: %s", name, error)
                time.sleep(_THREAD_ENDS_S)
                return None if self.arrived else self.lost()
            except BaseException as error:  # noqa: BLE001 - nobody else would hear of it
                say(traceback.format_exc())
                self._fail(name, f"it failed: {error!r}. Please report this.")
            # Leave time for the verdict to come, which may be why the thread has ended.
            time.sleep(_THREAD_ENDS_S)
            self._fail(name, "it has ended.")

        threading.Thread(target=run, name=f"odyssey-{name}", daemon=True).start()

    def _fail(self, name: str, why: str) -> None:
        if not self.arrived:
            why = f"the agent of this node cannot go on without its {name} thread: {why}"
            say(f"[odyssey] {why}")
            self.give(JobVerdict(code=1, why=why))

    def _run(self, control: Control) -> None:
        try:
            value = from_json(JobVerdict, control.get(keys.VERDICT))
            if not self.arrived:
                self.value = value
                if value.why:  # who gives one says why to people there alone
                    say(f"[odyssey] {value.why}")
        except ControlPlaneLost as error:
            _log.info("no verdict: %s", error)
        self.lost()
