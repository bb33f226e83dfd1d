"""``odyssey host``: host a job apart from its nodes, so that it survives the loss of any of them.

The process has no ranks and needs no GPU. It may run on the scheduler's machine, say, which is lost less often than one
of hundreds of nodes. It does what the first node's agent otherwise does for all: store, coordinator, page.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.config import OdysseyConfig, config_from_argv
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch import line
from odyssey_megatron.launch.agent.asking import Asking
from odyssey_megatron.launch.process import run_folder, tap
from odyssey_megatron.launch.process.open_files import allow_many
from odyssey_megatron.launch.process.signals import Received, heeded_behind
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.launch.wire.verdict import JobVerdict, VerdictWatch
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.metrics.outlet import say

if TYPE_CHECKING:
    from odyssey_megatron.launch.agent.hosting import Hosting

_LOOK_MS = 200
_NOWHERE = (
    "nodes have to know where to come: give --odyssey-job-host HOST:PORT, the same here and on their launch lines. It "
    "is a name or an address of this machine that they reach."
)


def main(argv: Sequence[str]) -> int:
    """Host a job until it ends, and return its exit code.

    Args:
        argv: The arguments of the job's ``odyssey run``. Those that concern a single node do not matter here.

    Raises:
        ConfigError: The arguments do not do. Nothing has been hosted.
    """
    allow_many()
    with tap.before(1, 2):
        args = line.parse(argv, "odyssey host")
        config = config_from_argv(args.training_script_args)
        line.say_what_is_ignored(config, args.training_script)
        if not config.job_host:
            raise ConfigError(_NOWHERE)
        nodes, token = line.number_of_nodes(args), line.token(several=True)
        on_signal = line.on_signal(config, nodes, args.training_script_args)
        run_folder.prepare(Path(config.run_dir))
        with heeded_behind():
            from odyssey_megatron.launch.agent.hosting import Hosting
            from odyssey_megatron.launch.wire.admission import Admission
            from odyssey_megatron.policy.planner import PolicyPlanner

        hosting = Hosting(config, PolicyPlanner(config), os.environ.get("ODYSSEY_TOKEN", ""), here=None)
        try:
            admission = Admission(line.meeting(args, config, nodes=nodes, token=token, hosts=True))
            address = admission.next_rendezvous().bootstrap_store_info
            assert address is not None
            where = (address.master_addr, address.master_port)
            # This process has no ranks that could leave, and if it goes the job goes, too.
            how = "stop" if on_signal == "stop" else "save"
            return _host(hosting, config, where, admission.token, nodes, how)
        finally:
            hosting.close()


class _NoRanks:
    """The ranks of this machine, of which there are none: nobody here reads what is asked."""

    listen = False

    def __init__(self, signals: Received):
        self.signals = signals

    def ask(self, what: Ask) -> None:
        pass

    def give_up(self) -> None:
        pass


def _host(
    hosting: Hosting, config: OdysseyConfig, where: tuple[str, int], token: str, nodes: int, how: str
) -> int:
    """Coordinate the job until its verdict, and return its exit code. ``how``: what the first signal asks for."""

    def connect() -> Control:
        return Control.connect(
            *where, token, timeout_s=10.0, lease_s=config.node_lease_s, writer="host", incarnation=0
        )

    control, verdict, others = connect(), VerdictWatch(connect()), tuple(range(nodes))
    hosting.name_job(control)
    journal = Journal(config.run_dir, source="host", job=control.get(keys.JOB_NAME))
    try:
        say(f"[odyssey] hosting a job of {nodes} node(s), which meet at {config.job_host}.")
        with Received().handled() as signals:
            hosting.begin(verdict, connect(), connect, journal, nodes=nodes)
            asking = Asking(
                how,
                journal,
                node=None,
                hosts=True,
                others=others,
                terminate_s=line.by_signal_s(config),
                ends=lambda: False,
                joining=lambda: False,
            )
            _await(verdict, signals, lambda: asking.heed(_NoRanks(signals), verdict, control))
        final = verdict.value or JobVerdict(code=1, nodes=others)
        hosting.part(control, final, time.monotonic())
        return final.code
    finally:
        journal.close()


def _await(verdict: VerdictWatch, signals: Received, heed: Callable[[], None]) -> None:
    poll = select.poll()
    for fd in (verdict.fd, signals.fd):
        poll.register(fd, select.POLLIN)
    while not verdict.arrived:
        poll.poll(_LOOK_MS)
        heed()
