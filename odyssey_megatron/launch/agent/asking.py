"""Decide what a signal to an agent means for its job."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Protocol

from odyssey_megatron.cluster.events import Ask, NodeLeaves
from odyssey_megatron.codec import to_json
from odyssey_megatron.errors import EXIT_AS_ASKED
from odyssey_megatron.launch.process.signals import Received
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.launch.wire.verdict import JobVerdict, VerdictWatch
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.metrics.outlet import say


class Ranks(Protocol):
    """The part of the ranks of the agent's node that is needed here."""

    signals: Received

    @property
    def listen(self) -> bool:
        """Whether any rank has joined the job. Otherwise nobody reads what the ranks are asked."""
        ...

    def ask(self, what: Ask) -> None: ...

    def give_up(self) -> None:
        """Report the ranks as dead, as they are to be killed. So nobody waits for the end of this node's lease."""
        ...


class Asking:
    """Turns signals into requests to the ranks.

    The first signal asks for what ``how`` says. If only this node is to leave, the coordinator is asked whether the
    others can go on without it; if they cannot, the job ends after a step. The second signal ends the job at once; or,
    if only this node was to leave, it ends this node's part in the job, as batch systems that take a node away send two
    signals.

    If no rank of this node listens (none is left, or they are about to join), the ranks of other nodes are asked to
    end. While an agent that takes a lost node's place has no rank in the job, a signal to it ends this agent only.

    Args:
        how: ``save``, ``leave`` or ``stop``: see ``--odyssey-on-sigterm``.
        node: The node whose agent gets the signals. None: ``odyssey host`` gets them, which has no ranks.
        hosts: Whether that process also hosts the job, so that it stays when its ranks leave.
        others: Nodes that are to hear of an end, besides the one where the job is hosted.
        terminate_s: Seconds from SIGTERM to SIGKILL if the first signal ends the job.
        ends: Says whether an agent whose own ranks do not listen has been asked to end the job.
        joining: Says whether this agent takes a lost node's place, and none of its ranks has joined yet.
    """

    def __init__(
        self,
        how: str,
        journal: Journal,
        *,
        node: int | None,
        hosts: bool,
        others: tuple[int, ...],
        terminate_s: float,
        ends: Callable[[], bool],
        joining: Callable[[], bool],
    ):
        self._how, self._journal, self._hosts, self._others = how, journal, hosts, others
        self._node, self._who = node, "the job's host" if node is None else f"the agent of node {node}"
        self._terminate_s = terminate_s
        self._ends, self._joining = ends, joining
        self._asked, self._told = Ask.NOTHING, False
        """What the ranks were asked for, and whether a signal has come here. The ranks may be asked without a signal
        here, when the end was requested elsewhere.
        """
        self._may_leave = False
        """Whether the others can go on without this node."""

    def heed(self, ranks: Ranks, verdict: VerdictWatch, control: Control) -> None:
        for number in ranks.signals.take():
            if (final := self._heed_signal(number, ranks, verdict, control)) is not None:
                verdict.give(final)
                return
        still = self._asked in (Ask.NOTHING, Ask.STAY) or (self._asked == Ask.LEAVE and ranks.listen)
        if still and self._ends():  # also if they were to leave: the last node to be asked is needed
            if self._told:
                say("[odyssey] the job ends after the step at hand, as another node was asked to end, too.")
            self._asked = Ask.END
            ranks.ask(Ask.END)
        if self._asked == Ask.STAY:
            self._hear_answer(ranks, control)
        if self._asked == Ask.LEAVE and not ranks.listen and not self._hosts:
            verdict.give(JobVerdict(code=EXIT_AS_ASKED, why="this node has left the job, as it was asked to"))

    def _heed_signal(
        self, number: signal.Signals, ranks: Ranks, verdict: VerdictWatch, control: Control
    ) -> JobVerdict | None:
        """Ask the ranks for what this signal asks for; return a verdict if it ends the job here at once."""
        if self._joining():
            return _leaves(
                ranks, number, f"this node does not join the job, as {number.name} came to {self._who}."
            )
        first, self._told = not self._told, True
        how = self._how if first and (ranks.listen or control.has([keys.JOB])) else "stop"
        self._journal.event("asked", signal=number.name, how=how, echo=True)
        if how == "stop" and (self._may_leave or self._asked == Ask.STAY) and not self._hosts:
            return _leaves(
                ranks,
                number,
                f"this node leaves the job at once, as {number.name} has come again to {self._who}.",
            )
        if how == "stop":
            why = f"the job was ended by {number.name} to {self._who}."
            say(f"[odyssey] {why}")
            self._journal.event("job_finished", verdict=why, exit_code=128 + number)
            final = JobVerdict(
                code=128 + number,
                why=why,
                terminate_s=self._terminate_s if first else 0.0,
                nodes=self._others,
            )
            verdict.give(final)  # before it comes back as somebody else's
            control.put_first(keys.VERDICT, to_json(final))
            return final
        if how == "leave" and self._node is not None and self._asked == Ask.NOTHING:
            self._asked = Ask.STAY
            ranks.ask(Ask.STAY)
            control.send(NodeLeaves(node=self._node))
            second = "ends the job" if self._hosts else "has it leave"
            what = "this node leaves the job after the step at hand, if the others can go on without it"
            say(f"[odyssey] {number.name}: {what}. A second signal {second} at once.")
        else:
            self._end(ranks, control, number.name)
        return None

    def _hear_answer(self, ranks: Ranks, control: Control) -> None:
        """Have the ranks leave, or the job end, once the coordinator has said which."""
        assert self._node is not None
        needed = control.peek(keys.may_leave_key(self._node))
        if needed:
            self._end(ranks, control, f"this node cannot leave, as {needed}")
        elif needed is not None:
            self._asked, self._may_leave = Ask.LEAVE, True
            ranks.ask(Ask.LEAVE)

    def _end(self, ranks: Ranks, control: Control, why: str) -> None:
        self._asked = Ask.END
        say(f"[odyssey] {why}: the job ends after the step at hand. A second signal ends the job at once.")
        ranks.ask(Ask.END)
        control.put(keys.END, "")  # the ranks of this node may only be standing by, and not listen


def _leaves(ranks: Ranks, number: signal.Signals, why: str) -> JobVerdict:
    """Return the verdict for this node only, with which its ranks are killed; the job goes on."""
    say(f"[odyssey] {why}")
    ranks.give_up()
    return JobVerdict(code=128 + number, why=why, terminate_s=0.0)
