"""What the host of a job does for all of it: its run folder, its name, its page, its coordinator, its verdict.

The host is the agent of the first node, or ``odyssey host`` (``host.py``), which has no ranks.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import EXIT_BAD_INPUT, ControlPlaneLost
from odyssey_megatron.launch.agent.onlookers import Onlookers
from odyssey_megatron.launch.coordinator.coordinator import Coordinator
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.process import run_folder
from odyssey_megatron.launch.process.open_files import check_many
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.admission import OTHER_TOKEN
from odyssey_megatron.launch.wire.awake import Pauses
from odyssey_megatron.launch.wire.control import Control, EventReader
from odyssey_megatron.launch.wire.lost_host import COMES_BACK_S
from odyssey_megatron.launch.wire.verdict import JobVerdict, VerdictWatch
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.metrics.outlet import say

_LOOK_S = 0.2
_LEASE_LOOKS = 5
"""A lease is renewed several times within this fraction (1/5) of its length."""
_FAREWELL_S = 4.0
"""How long the store is kept after the verdict, so that the others can read it."""

_NOT_ALL = (
    "the agent(s) of node(s) {missing} came, and have not started their ranks within {limit_s:g} s "
    "(--odyssey-store-timeout-s). Their logs may say why, if they have not been killed."
)

_STOOD_STILL = (
    "[odyssey] this job's host stood still for {lasted_s:.1f} s. What failed meanwhile is noticed only now."
)


class Hosting:
    """The hosting of one job, in this process.

    Args:
        page_secret: The secret from which the page's token is made, if the page wants one.
        here: The node whose agent this is. None: it is no agent.
        launched_s: When the job's command began, by ``time.monotonic()``. None: it may have waited for days.

    Raises:
        ConfigError: The run folder belongs to another job, or a port of the page is taken.
    """

    def __init__(
        self,
        config: OdysseyConfig,
        planner: Planner,
        page_secret: str,
        *,
        here: int | None,
        launched_s: float | None = None,
    ):
        self._config, self._planner, self._here, self._launched_s = config, planner, here, launched_s
        self._nodes = 0
        run_folder.claim(Path(config.run_dir))
        self._onlookers = Onlookers(config, page_secret)

    @staticmethod
    def name_job(control: Control) -> None:
        """Name the job by a random number, which the other agents read."""
        control.put_first(keys.JOB_NAME, secrets.token_hex(4))

    def begin(
        self,
        verdict: VerdictWatch,
        control: Control,
        connect: Callable[[], Control],
        journal: Journal,
        *,
        nodes: int,
    ) -> None:
        """Coordinate the job in a thread that ``verdict`` guards, so that the job does not go on without it.

        Args:
            control: A connection that only this thread uses.
            nodes: The number of nodes with ranks.
        """
        self._nodes = nodes
        verdict.guard("coordinator", lambda: self._coordinate(control, connect, journal, nodes))

    def part(self, control: Control, final: JobVerdict, began_s: float) -> None:
        """Keep the store until the others have heard of the end. ``began_s``: when this process heard of it."""
        with contextlib.suppress(ControlPlaneLost, TimeoutError):
            control.put_first(keys.VERDICT, to_json(final))  # it may have been made here
            if there := sorted({*final.nodes, *self._about_to_join(control, final.nodes)}):
                left_s = max(began_s + _FAREWELL_S - time.monotonic(), 0.1)
                control.wait([keys.bye_key(other) for other in there], left_s)

    def _about_to_join(self, control: Control, known: Sequence[int]) -> list[int]:
        """Return the nodes with a living agent that the coordinator does not know, as their ranks have not joined.

        ``known`` are those that it knows.
        """
        others = {*range(self._nodes)} - {*known, self._here}
        leases = {node: key for node in others if control.has([key := keys.lease_key(node)])}
        if not leases:
            return []
        before = control.latest([*leases.values()])
        time.sleep(min(self._config.node_lease_s / _LEASE_LOOKS, _FAREWELL_S))
        after = control.latest([*leases.values()])
        return [node for node, was, now in zip(leases, before, after, strict=True) if was != now]

    def close(self) -> None:
        self._onlookers.close()

    def _coordinate(
        self, control: Control, connect: Callable[[], Control], journal: Journal, nodes: int
    ) -> None:
        of_rank = self._await_nodes(control, nodes)
        if isinstance(of_rank, JobVerdict):
            return control.put(keys.VERDICT, to_json(of_rank))
        check_many(len(of_rank), nodes)
        only: dict[str, Any] = {"observes": True} if self._config.mode == "observe" else {}
        if self._config.inject:
            only["inject"] = self._config.inject
        if self._launched_s is not None:
            only["launched_s"] = self._launched_s
        journal.event("job_started", world_size=len(of_rank), nodes=nodes, **only, echo=True)
        self._onlookers.start()

        def tell(lasted_s: float) -> None:
            journal.event("stood_still", lasted_s=lasted_s)
            say(_STOOD_STILL.format(lasted_s=lasted_s))

        # The others count from the last time that they renewed their leases.
        pauses = Pauses(0.9 * self._config.node_lease_s + COMES_BACK_S, tell)
        pauses.start()
        Coordinator(
            control=control,
            events=EventReader(connect()),
            config=self._config,
            nodes=of_rank,
            planner=self._planner,
            journal=journal,
            say=say,
            here=self._here,
            pauses=pauses,
        ).run()

    def _await_nodes(self, control: Control, count: int) -> dict[int, int] | JobVerdict:
        """Return the node of each rank, once all agents have listed theirs. A verdict if they do not."""
        limit_s = self._config.store_timeout_s
        listed = [keys.node_key(node) for node in range(count)]
        # In ``odyssey host``, time counts from the first node that comes: nodes may stand in a scheduler's queue.
        if self._here is None:
            while not any(control.has([node]) for node in listed):
                time.sleep(_LOOK_S)
        ends_s = time.monotonic() + limit_s
        while not control.has([*listed, *(keys.lease_key(node) for node in range(count))]):
            if control.other_token_seen():
                return JobVerdict(code=EXIT_BAD_INPUT, why=OTHER_TOKEN)
            if time.monotonic() > ends_s:
                return JobVerdict(
                    code=1, why=_NOT_ALL.format(missing=self._not_there(control, count), limit_s=limit_s)
                )
            time.sleep(0.02)
        ranks = {node: json.loads(text) for node, text in enumerate(control.read(listed))}
        return {rank: node for node in ranks for rank in ranks[node]}

    @staticmethod
    def _not_there(control: Control, count: int) -> list[int]:
        return [node for node in range(count) if not control.has([keys.node_key(node), keys.lease_key(node)])]
