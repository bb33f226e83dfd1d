"""``odyssey readmit``: a GPU works again whose rank was given up, and the rank is to come back into the running job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import Between, Parser, printable
from odyssey_megatron.launch.wire import requests
from odyssey_megatron.metrics.journal import clock, file_of, read_journal

_AGENT = re.compile(r"[\w-]{1,60}/agent\d{1,6}", re.ASCII)
"""Job and source of a line by an agent. The journal is a file that others may have written to."""


def main(argv: list[str]) -> int:
    """Brings back a rank that was given up, with its GPU, into the running job: the GPU was reset or replaced. To be
    called on the rank's machine, by the user who has started the job.
    """
    parser = Parser(prog="odyssey readmit", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, help="--odyssey-run-dir of the job")
    parser.add_argument(
        "--rank",
        type=Between(0, 1_000_000, whole=True),
        required=True,
        help="the rank that was given up; the log and the journal (given_up) name it",
    )
    parser.add_argument(
        "--gpu",
        type=Between(0, 1023, whole=True),
        help="the GPU's number on its node, if the rank was given up on several",
    )
    args = parser.parse_args(argv)
    job, node = _agent_of(args.run_dir, args.rank)
    try:
        said = requests.ask(job, node, args.rank, args.gpu, owner=_owner(args.run_dir, node))
        print(printable(said))
    except ConnectionRefusedError:
        raise ConfigError(
            f"the agent of node {node}, which has started rank {args.rank} on this machine, cannot be reached. If the "
            "job has ended, no rank comes back. If it runs in a container, call this command there. If it has lost the "
            "node, 'odyssey join' brings all its ranks back."
        ) from None
    return 0


def _agent_of(run_dir: Path, rank: int) -> tuple[str, int]:
    """Return the name of the running job in ``run_dir``, and the node whose agent has started ``rank``.

    Raises:
        ConfigError: There is no such job or rank, the job has ended, or that agent is on another machine.
    """
    started: dict[str, Any] = {}
    ended: dict[str, str] = {}
    for event in read_journal(run_dir, only=("rank_started", "job_finished")):
        if (
            event["event"] == "rank_started"
            and event.get("target") == rank
            and _AGENT.fullmatch(_agent(event))
        ):
            started = event
        elif event["event"] == "job_finished":
            ended[event.get("job", "")] = event.get("verdict", "")
    if not started:
        raise ConfigError(
            f"{run_dir} has no record of a rank {rank}. Name the job's --odyssey-run-dir and one of its ranks."
        )
    job, node = started["job"], int(started["source"].removeprefix("agent"))
    if job in ended:
        raise ConfigError(f"the job in {run_dir} has ended ({ended[job]}), so no rank can come back into it.")
    if started.get("clock", clock()) != clock():
        raise ConfigError(
            f"rank {rank} is of node {node}, whose machine is {started.get('host', 'another one')}: call this command "
            "there. If that machine is gone, 'odyssey join' on the one that replaces it brings all its ranks back."
        )
    return job, node


def _owner(run_dir: Path, node: int) -> int | None:
    """Return the user whose file the journal of ``node``'s agent is; None if that is not known."""
    try:
        return file_of(run_dir, f"agent{node}").stat().st_uid
    except OSError:
        return None


def _agent(event: Mapping[str, Any]) -> str:
    return f"{event.get('job', '')}/{event['source']}"
