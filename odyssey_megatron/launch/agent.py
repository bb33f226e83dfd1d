"""The agent of one node: torch elastic's agent, except that ranks live on when one of them dies.

torch elastic does the rest: arguments, logs, rendezvous, the store, environment and start of the ranks. The seam
is the name ``torch.distributed.launcher.api.LocalElasticAgent`` (torch 2.13; see ``run.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import EXIT_BAD_INPUT, ConfigError, ControlPlaneLost
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch import run_folder
from odyssey_megatron.launch.admission import OTHER_TOKEN
from odyssey_megatron.launch.asking import Asking
from odyssey_megatron.launch.control import Control, EventReader
from odyssey_megatron.launch.coordinator import Coordinator
from odyssey_megatron.launch.forking import all_begun, forking
from odyssey_megatron.launch.heartbeat import HeartbeatBoard
from odyssey_megatron.launch.leases import FirstAgent, beats
from odyssey_megatron.launch.onlookers import Onlookers
from odyssey_megatron.launch.planner import Planner
from odyssey_megatron.launch.ranks import Fence, Ranks
from odyssey_megatron.launch.respawn import Respawn, forget_smaller
from odyssey_megatron.launch.signals import Received
from odyssey_megatron.launch.verdict import Verdict, VerdictWatch
from odyssey_megatron.launch.zygote import Zygote
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.metrics.outlet import say

_log = logging.getLogger(__name__)

_ORPHANS_S = 2.0
"""From SIGTERM to SIGKILL where the first agent is gone: nobody is left to help, and such a job is to end soon."""
_RUNNING = (
    "a job with a node {node} is running under this address. To replace that node after it was lost, use 'odyssey "
    "join' with the same arguments; for another job, use another --master-port."
)
_NOT_RUNNING = (
    "no job with a node {node} is running under this address, so there is nothing to join. Start one with 'odyssey "
    "run'."
)
_ALIVE = (
    "node {node} is alive: its agent renews its lease, so no other can take its place. 'odyssey join' replaces a node "
    "that was lost; --node-rank says which."
)
_RESPAWNS_OF_A_NODE = 10_000
"""More than a node's agent can start a rank again: incarnations of a rank are never alike."""
_CONNECT_S = 10.0
"""For an agent's connection to the store where all have met a moment ago: if it is gone, so is the job."""
_SEEN_S = 0.5
"""For others to see that secrets differ, where the store goes with the process that has found it."""
_FAREWELL_S = 4.0
"""From the verdict on: how long the first agent keeps the store for the others to read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What ``odyssey run`` hands to its agent."""

    config: OdysseyConfig
    token: str
    planner: Planner
    zygote: Zygote | None = None
    page_secret: str = ""
    """What the page's token is made from, where it wants one."""
    on_signal: str = "stop"
    """``save``, ``leave`` or ``stop``: see ``--odyssey-on-sigterm``."""
    joins: bool = False
    """The node takes the place of one that was lost, in a job that runs."""


class OdysseyAgent(LocalElasticAgent):
    """Starts the ranks of its node, reports and fences them; the first agent hosts the coordinator."""

    def __init__(self, *, launch: Launch, **kwargs: Any):
        super().__init__(**kwargs)
        self._launch = launch
        self._token, self._incarnation = launch.token, 0
        self._onlookers: Onlookers | None = None

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: Any) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env["ODYSSEY_SLOT"] = str(local_rank)

    def _rendezvous(self, worker_group: Any) -> None:
        super()._rendezvous(worker_group)
        if worker_group.group_rank == 0:
            self._folder = run_folder.claim(Path(self._launch.config.run_dir))
            self._onlookers = Onlookers(self._launch.config, self._launch.page_secret)
        self._token = getattr(worker_group.spec.rdzv_handler, "token", "") or self._launch.token
        os.environ["ODYSSEY_TOKEN"] = self._token  # for the ranks
        control = self._connect()
        if not control.same_token():
            time.sleep(_SEEN_S)
            raise ConfigError(OTHER_TOKEN)
        node = worker_group.group_rank
        running = control.has([keys.node_key(node)])
        if running != self._launch.joins:
            raise ConfigError(_NOT_RUNNING.format(node=node) if not running else _RUNNING.format(node=node))
        if node == 0:
            control.put_first(keys.JOB_NAME, secrets.token_hex(4))
        os.environ["ODYSSEY_JOB"] = _name_of_job(control)
        if running:
            # Before anything is written or started in its name.
            if beats(control, node, self._launch.config.node_lease_s):
                raise ConfigError(_ALIVE.format(node=node))
            self._incarnation = control.count(f"{keys.node_key(node)}/replaced")
            os.environ["ODYSSEY_INCARNATION"] = str(_RESPAWNS_OF_A_NODE * self._incarnation)
            for worker in worker_group.workers:
                control.put(keys.here_key(worker.global_rank), "")
            forget_smaller(control, [worker.global_rank for worker in worker_group.workers])

    def _invoke_run(self, role: str = "default") -> RunResult:
        group, launch = self._worker_group, self._launch
        board = HeartbeatBoard(group.spec.local_world_size)
        os.environ.update(
            ODYSSEY_HEARTBEAT=str(board.path),
            ODYSSEY_PARENT_PID=str(os.getpid()),
        )
        try:
            try:
                with forking(launch.zygote), all_begun():
                    self._initialize_workers(group)
            except ControlPlaneLost:
                raise SystemExit(self._orphaned()) from None
            with Received().handled() as signals:  # torch's own would end the ranks
                code = self._supervise(board, signals)
        finally:
            board.close()
            if self._onlookers is not None:
                self._onlookers.close()
        if code:
            # Not a failed RunResult: torch would raise and print an error of its own for a verdict of ours.
            raise SystemExit(code)
        group.state = WorkerState.SUCCEEDED
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in group.workers}
        )

    def _supervise(self, board: HeartbeatBoard, signals: Received) -> int:
        node = self._worker_group.group_rank
        journal = Journal(self._launch.config.run_dir, source=f"agent{node}", job=os.environ["ODYSSEY_JOB"])
        try:
            return self._see_through(board, journal, signals)
        finally:
            journal.close()

    def _see_through(self, board: HeartbeatBoard, journal: Journal, signals: Received) -> int:
        group, launch = self._worker_group, self._launch
        node, nodes = group.group_rank, group.group_world_size
        assert node is not None
        assert nodes is not None
        assert self._pcontext is not None
        try:
            control, watch, spare = (self._connect() for _ in range(3))
            control.put(keys.node_key(node), json.dumps([w.global_rank for w in group.workers]))
            control.put(keys.lease_key(node), "")
        except ControlPlaneLost:
            return self._orphaned()
        handles = self._pcontext.subprocess_handlers
        acts = launch.config.mode != "observe"
        respawn = Respawn(self._pcontext, control, launch.config, launch.zygote, journal) if acts else None
        fence = Fence(launch.config.hang_s, kills=acts)
        ranks = Ranks(control, board, signals, fence, respawn)
        for worker in group.workers:
            process = handles[worker.local_rank].proc
            ranks.add(worker.global_rank, worker.local_rank, process)
            journal.event(
                "rank_started", target=worker.global_rank, pid=process.pid, host=socket.gethostname()
            )
        verdict = VerdictWatch(watch)
        if node == 0:
            journal.event("job_started", world_size=group.workers[0].world_size, nodes=nodes, echo=True)
            if self._onlookers is not None:
                self._onlookers.start()
            verdict.guard("coordinator", lambda: self._coordinate(spare, journal, nodes))
        else:
            lease_s, port = launch.config.node_lease_s, group.master_port
            assert port is not None
            first = FirstAgent(lease_s)
            verdict.guard("lease", lambda: first.renew(spare, node, lease_s / 20))
            verdict.guard("first agent", lambda: first.await_loss(port))
        ask = Asking(launch.on_signal, journal, nodes=nodes, node=node)
        try:
            ranks.watch(verdict, lambda: ask.heed(ranks, verdict, control))
        except ControlPlaneLost:
            verdict.lost()
        return self._conclude(verdict, ranks, control)

    def _connect(self) -> Control:
        group = self._worker_group
        assert group.master_addr is not None
        assert group.master_port is not None
        return Control.connect(
            group.master_addr,
            group.master_port,
            self._token,
            timeout_s=_CONNECT_S,
            lease_s=self._launch.config.node_lease_s,
            writer=f"agent{group.group_rank}",
            incarnation=self._incarnation,
        )

    def _orphaned(self) -> int:
        """The exit code of an agent whose job has ended without a word to it."""
        node = self._worker_group.group_rank
        say(f"[odyssey] node {node} stops: the first agent, which hosts the coordinator, is gone.")
        return 1

    def _coordinate(self, control: Control, journal: Journal, world: int) -> None:
        launch = self._launch
        nodes = self._await_nodes(control, world)
        if isinstance(nodes, Verdict):
            say(f"[odyssey] {nodes.why}")
            return control.put(keys.VERDICT, to_json(nodes))
        events = EventReader(self._connect())
        Coordinator(
            control=control,
            events=events,
            config=launch.config,
            nodes=nodes,
            planner=launch.planner,
            journal=journal,
            say=say,
        ).run()

    def _await_nodes(self, control: Control, count: int) -> dict[int, int] | Verdict:
        """The node of each rank, once all agents have listed theirs."""
        limit_s = self._launch.config.store_timeout_s
        listed = [keys.node_key(node) for node in range(count)]
        ends_s = time.monotonic() + limit_s
        while not control.has([*listed, *(keys.lease_key(node) for node in range(count))]):
            if control.other_token_seen():
                return Verdict(code=EXIT_BAD_INPUT, why=OTHER_TOKEN)
            if time.monotonic() > ends_s:
                return Verdict(code=1, why=f"not all of {count} nodes have joined within {limit_s} s.")
            time.sleep(0.02)
        ranks = {node: json.loads(text) for node, text in enumerate(control.read(listed))}
        return {rank: node for node in ranks for rank in ranks[node]}

    def _conclude(self, verdict: VerdictWatch, ranks: Ranks, control: Control) -> int:
        """Lets the ranks end, or ends them; returns the exit code of the job."""
        final, began_s = verdict.value or Verdict(code=1, terminate_s=_ORPHANS_S), time.monotonic()
        ranks.drain(final.grace_s)
        ranks.end(final.terminate_s)
        if verdict.value is None:
            return self._orphaned()
        node = self._worker_group.group_rank
        with contextlib.suppress(ControlPlaneLost, TimeoutError):
            if node == 0:
                control.put_first(keys.VERDICT, to_json(final))  # it may have been made here
            control.put(f"bye/{node}", "")
            if node == 0 and final.nodes:  # the store goes with this process
                left_s = max(began_s + _FAREWELL_S - time.monotonic(), 0.1)
                control.wait([f"bye/{other}" for other in final.nodes], left_s)
        return final.code


def _name_of_job(control: Control) -> str:
    """As the first agent has it. Raises ConfigError if that one has another secret."""
    ends_s = time.monotonic() + _CONNECT_S
    while not control.has([keys.JOB_NAME]):
        if control.other_token_seen():
            raise ConfigError(OTHER_TOKEN)
        if time.monotonic() > ends_s:
            raise ControlPlaneLost("the first agent has not named the job")
        time.sleep(0.02)
    return control.get(keys.JOB_NAME)
