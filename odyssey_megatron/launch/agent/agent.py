"""The agent of one node: torch elastic's agent, except that the other ranks go on when one of them dies.

torch elastic does the rest: arguments, logs, rendezvous, the store, the ranks' environment and their start. It is
replaced under the name ``torch.distributed.launcher.api.LocalElasticAgent`` (torch 2.13; see ``run.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState, _RoleInstanceInfo
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from odyssey_megatron.cluster.events import STARTS_OF_AN_AGENT
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import EXIT_BAD_INPUT, ConfigError, ControlPlaneLost
from odyssey_megatron.launch.agent.asking import Asking
from odyssey_megatron.launch.agent.gathering import gather
from odyssey_megatron.launch.agent.hosting import Hosting
from odyssey_megatron.launch.agent.ranks import Fence, Ranks
from odyssey_megatron.launch.agent.respawn import Respawn, first_incarnation, forget_smaller
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.process.forking import all_begun, forking
from odyssey_megatron.launch.process.heartbeat import HeartbeatBoard
from odyssey_megatron.launch.process.signals import Received
from odyssey_megatron.launch.process.zygote import Zygote
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.admission import OTHER_TOKEN
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.launch.wire.leases import HostOfJob, beats
from odyssey_megatron.launch.wire.requests import Requests
from odyssey_megatron.launch.wire.verdict import SAYS_WHY, TERMINATE_S, JobVerdict, VerdictWatch
from odyssey_megatron.metrics.journal import Journal, host_name, read_journal
from odyssey_megatron.metrics.outlet import say
from odyssey_megatron.metrics.strikes import LOOKED_AT, not_struck, not_struck_line

_log = logging.getLogger(__name__)

_ORPHANS_S = 2.0
"""Time from SIGTERM to SIGKILL if the coordinator's host is gone: nothing can help the job, which is to end soon."""
_RUNNING = (
    "a job with a node {node} is running under this address. To replace that node after it was lost, use 'odyssey "
    "join' with the same arguments. Each node of a job has a --node-rank of its own, and each job a --master-port."
)
_NOT_RUNNING = (
    "no job with a node {node} is running under this address, so there is nothing to join. Start one with 'odyssey "
    "run'."
)
_ALIVE = (
    "node {node} is alive: its agent renews its lease, so no other can take its place. 'odyssey join' replaces a node "
    "that was lost; --node-rank says which."
)
_ENDED = "the job under this address has just ended, so node {node} has nothing to join. Start one with 'odyssey run'."
_OTHERS = (
    "node {node} has {had} rank(s) in this job, and this command would start {ranks}. Use the arguments of its "
    "'odyssey run', --nproc-per-node too."
)
_REPLACED = (
    "another agent has taken the place of node {node} ('odyssey join') while this one was silent for longer than "
    "--odyssey-node-lease-s, so that this one ends."
)
_REFUSED = (
    "node {node} does not join the job, as its rank {rank} was refused; the job goes on without. {says_why} Then use "
    "'odyssey join' again."
)
_CONNECT_S = 10.0
"""Timeout of an agent's connection to the store. All have met there a moment ago: if it is gone, so is the job."""
_SEEN_S = 0.5
"""Time for others to see that secrets differ, since the store may end with the process that has found it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The settings that ``odyssey run`` hands to its agent."""

    config: OdysseyConfig
    token: str
    planner: Planner
    launched_s: float
    """When ``odyssey run`` began."""
    zygote: Zygote | None = None
    page_secret: str = ""
    """The secret from which the page's token is made, if the page wants one."""
    on_signal: str = "stop"
    """``save``, ``leave`` or ``stop``: see ``--odyssey-on-sigterm``."""
    terminate_s: float | None = None
    """Seconds from SIGTERM to SIGKILL that the user gives ranks (``--shutdown-timeout``). None: the verdict says."""
    by_signal_s: float = TERMINATE_S
    """What the verdict says if a signal ends the job."""
    joins: bool = False
    """Whether the node takes the place of one that was lost, in a job that is running."""


class OdysseyAgent(LocalElasticAgent):
    """Starts the ranks of its node, reports their deaths, and fences them.

    The first node's agent hosts the job, unless ``odyssey host`` does.
    """

    def __init__(self, *, launch: Launch, **kwargs: Any):
        super().__init__(**kwargs)
        self._launch = launch
        self._token, self._incarnation = launch.token, 0
        self._hosting: Hosting | None = None
        self._is_replaced = False
        """Whether another agent has taken the node's place."""

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: Any) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env["ODYSSEY_SLOT"] = str(local_rank)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: Any
    ) -> list[Worker]:
        group: Any = self._worker_group
        group.group_rank = group_rank  # torch sets it later, but the job may end before
        says = _RoleInstanceInfo(spec.role, group_rank, spec.local_world_size).serialize()
        gather(store, group_rank, group_world_size, says)
        workers: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        return workers

    def _rendezvous(self, worker_group: Any) -> None:
        super()._rendezvous(worker_group)
        config = self._launch.config
        if worker_group.group_rank == 0 and not config.job_host:
            launch = self._launch
            self._hosting = Hosting(
                config, launch.planner, launch.page_secret, here=0, launched_s=launch.launched_s
            )
        self._token = getattr(worker_group.spec.rdzv_handler, "token", "") or self._launch.token
        os.environ["ODYSSEY_TOKEN"] = self._token  # for the ranks
        control = self._connect()
        if not control.same_token():
            time.sleep(_SEEN_S)
            raise ConfigError(OTHER_TOKEN)
        node = worker_group.group_rank
        ranks, joins = [worker.global_rank for worker in worker_group.workers], self._launch.joins
        # Counted, as two may come as the same node at once.
        running = control.has([keys.node_key(node)]) if joins else control.count(keys.agents_key(node)) > 1
        if running != joins:
            raise ConfigError(_NOT_RUNNING.format(node=node) if not running else _RUNNING.format(node=node))
        if self._hosting is not None:
            self._hosting.name_job(control)
        os.environ["ODYSSEY_JOB"] = _name_of_job(control)
        if joins:
            self._take_over(control, node, ranks)
        else:
            control.put(keys.node_key(node), json.dumps(ranks))

    def _take_over(self, control: Control, node: int, ranks: list[int]) -> None:
        """Take the place of the agent of ``node``, which was lost. Raises ConfigError if it was not."""
        # Checked before anything is written or started in the node's name.
        if beats(control, node, self._launch.config.node_lease_s):
            raise ConfigError(_ALIVE.format(node=node))
        if control.said(keys.VERDICT):  # its host waits for the agents before it goes
            raise ConfigError(_ENDED.format(node=node))
        if (had := json.loads(control.get(keys.node_key(node)))) != ranks:
            raise ConfigError(_OTHERS.format(node=node, had=len(had), ranks=len(ranks)))
        self._incarnation = control.count(keys.replaced_key(node))
        # The new lease must be known before ranks join: else they would be lost with the agent before this one.
        self._connect().put(keys.lease_key(node), "")
        for key in (keys.bye_key(node), keys.may_leave_key(node)):  # of the agent before this one
            control.forget(key)
        os.environ["ODYSSEY_INCARNATION"] = str(STARTS_OF_AN_AGENT * self._incarnation)
        for rank in ranks:
            control.put(keys.here_key(rank), "")
            control.forget(keys.joined_key(rank))
        forget_smaller(control, ranks)

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
            if self._hosting is not None:
                self._hosting.close()
        if code:
            # Not a failed RunResult, as torch would raise and print an error of its own for our verdict.
            raise SystemExit(code)
        group.state = WorkerState.SUCCEEDED
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in group.workers}
        )

    def _supervise(self, board: HeartbeatBoard, signals: Received) -> int:
        node = self._worker_group.group_rank
        journal = Journal(self._launch.config.run_dir, source=f"agent{node}", job=os.environ["ODYSSEY_JOB"])
        try:
            code = self._see_through(board, journal, signals)
        finally:
            journal.close()
        if code != EXIT_BAD_INPUT:  # nothing could strike in a job that has been refused
            self._name_faults_left()
        return code

    def _name_faults_left(self) -> None:
        """Tell the user of faults that this node's ranks were to have, and have not had: their journals are here."""
        config, faults = self._launch.config, self._launch.config.injections
        ours = {worker.global_rank for worker in self._worker_group.workers}
        if not any(one.ranks[0] in ours for one in faults):
            return
        with contextlib.suppress(ConfigError):  # a journal that cannot be read says nothing
            found = list(read_journal(config.run_dir, only=LOOKED_AT))
            events = [event for event in found if event.get("job") == os.environ["ODYSSEY_JOB"]]
            left = not_struck(events, config.inject)
            if line := not_struck_line(events, [left[one] for one in left if faults[one].ranks[0] in ours]):
                say(f"[odyssey] {line}")

    def _see_through(self, board: HeartbeatBoard, journal: Journal, signals: Received) -> int:
        group, launch = self._worker_group, self._launch
        node, nodes = group.group_rank, group.group_world_size
        assert node is not None
        assert nodes is not None
        assert self._pcontext is not None
        try:
            control, watch, spare = (self._connect() for _ in range(3))
            control.put(keys.lease_key(node), "")
        except ControlPlaneLost:
            return self._orphaned()
        handles = self._pcontext.subprocess_handlers
        acts = launch.config.mode != "observe"
        respawn = Respawn(self._pcontext, control, launch.config, launch.zygote, journal) if acts else None
        fence = Fence(launch.config.hang_s, launch.config.op_timeout_s, kills=acts)
        ranks = Ranks(control, board, signals, fence, respawn)
        for worker in group.workers:
            process = handles[worker.local_rank].proc
            ranks.add(worker.global_rank, worker.local_rank, process, first_incarnation())
            journal.event("rank_started", target=worker.global_rank, pid=process.pid, host=host_name())
        verdict = VerdictWatch(watch)
        requests = Requests(os.environ["ODYSSEY_JOB"], node)
        lease_s, port = launch.config.node_lease_s, group.master_port
        assert port is not None
        host = HostOfJob(lease_s)
        if self._hosting is not None:
            self._hosting.begin(verdict, spare, self._connect, journal, nodes=nodes)
            verdict.guard("end", lambda: host.listen(self._connect()))
        else:
            verdict.guard("lease", lambda: self._renew(host, spare, node, verdict))
            verdict.guard("host", lambda: host.await_loss(port))
        others = tuple(range(0 if launch.config.job_host else 1, nodes))
        ask = Asking(
            launch.on_signal,
            journal,
            node=node,
            hosts=self._hosting is not None,
            others=others,
            terminate_s=launch.by_signal_s,
            ends=lambda: host.ends,
            joining=lambda: self._is_joining(control),
        )

        def heed() -> None:
            ask.heed(ranks, verdict, control)
            requests.answer(ranks.readmit)
            if ranks.refused is not None:
                self._turn_back(ranks, verdict, control)

        try:
            ranks.watch(verdict, heed)
        except ControlPlaneLost:
            verdict.lost()
        finally:
            requests.close()
        return self._conclude(verdict, ranks, control)

    def _renew(self, host: HostOfJob, control: Control, node: int, verdict: VerdictWatch) -> None:
        host.renew(control, node, self._launch.config.node_lease_s / 20, self._incarnation)
        self._is_replaced, why = True, _REPLACED.format(node=node)
        say(f"[odyssey] {why}")
        verdict.give(JobVerdict(code=1, why=why))

    def _is_joining(self, control: Control) -> bool:
        """Whether this agent takes a lost node's place, and none of its ranks has joined yet."""
        workers = self._worker_group.workers
        return self._launch.joins and not any(
            control.said(keys.joined_key(one.global_rank)) for one in workers
        )

    def _turn_back(self, ranks: Ranks, verdict: VerdictWatch, control: Control) -> None:
        """End this node's part if a rank was refused before any has joined: another agent may take its place then."""
        group = self._worker_group
        rank, ranks.refused = ranks.refused, None
        if not self._is_joining(control):
            return
        why = _REFUSED.format(node=group.group_rank, rank=rank, says_why=SAYS_WHY)
        say(f"[odyssey] {why}")
        ranks.give_up()
        verdict.give(JobVerdict(code=EXIT_BAD_INPUT, why=why))

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
        """Tell the user that the job's host is gone, and return the exit code."""
        node, apart = self._worker_group.group_rank, self._launch.config.job_host
        host = f"odyssey host at {apart}" if apart else "the first agent"
        say(f"[odyssey] node {node} stops: {host}, which hosts the coordinator, is gone or out of reach.")
        return 1

    def _conclude(self, verdict: VerdictWatch, ranks: Ranks, control: Control) -> int:
        """Let the ranks end, or end them, and return the exit code of the job."""
        final, began_s = verdict.value or JobVerdict(code=1, terminate_s=_ORPHANS_S), time.monotonic()
        ranks.drain(final.grace_s)
        ranks.end(final.leaves_s(self._launch.terminate_s))
        if verdict.value is None:
            return self._orphaned()
        if self._is_replaced:
            return final.code
        with contextlib.suppress(ControlPlaneLost, TimeoutError):
            control.put(keys.bye_key(self._worker_group.group_rank or 0), "")
            if self._hosting is not None:  # the store goes with this process
                self._hosting.part(control, final, began_s)
        return final.code


def _name_of_job(control: Control) -> str:
    """Return the job's name, which its host has set. Raises ConfigError if the host has another secret."""
    ends_s = time.monotonic() + _CONNECT_S
    while not control.has([keys.JOB_NAME]):
        if control.other_token_seen():
            raise ConfigError(OTHER_TOKEN)
        if time.monotonic() > ends_s:
            raise ControlPlaneLost("the first agent has not named the job")
        time.sleep(0.02)
    return control.get(keys.JOB_NAME)
