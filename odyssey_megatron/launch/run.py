"""``odyssey run``: torchrun's command line, with an agent whose ranks survive the loss of others."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from odyssey_megatron.config import OdysseyConfig, config_from_argv
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch import line
from odyssey_megatron.launch.process import run_folder, signals, tap
from odyssey_megatron.launch.process.open_files import allow_many
from odyssey_megatron.launch.process.zygote import Zygote, prepare_environment

_ENTRY = "odyssey_megatron.mcore.entry"


def main(argv: Sequence[str], *, joins: bool = False) -> int:
    """Run a job, or this node's part of it, and return the job's exit code.

    Args:
        argv: ``[--preload MODULE,...] [torchrun arguments] script [script arguments]``.
        joins: Whether this node takes the place of one that a running job has lost; ``argv`` are that job's.

    Raises:
        ConfigError: The arguments or the machine do not fit; no rank was started.
    """
    launched_s = time.monotonic()  # before torch is imported, and modules are preloaded
    allow_many()
    with tap.before(1, 2):
        return _run(argv, joins, launched_s)


def _run(argv: Sequence[str], joins: bool, launched_s: float) -> int:
    prepare_environment(os.environ)
    args = line.parse(argv, "odyssey join" if joins else "odyssey run")
    config = config_from_argv(args.training_script_args)
    line.say_what_is_ignored(config, args.training_script)
    nodes = line.number_of_nodes(args)
    if args.node_rank >= nodes:
        raise ConfigError(
            f"--node-rank {args.node_rank}: --nnodes {nodes} has the node ranks 0 to {nodes - 1}."
        )
    _check_injections(config, nodes, args.nproc_per_node)
    token = line.token(several=nodes > 1 or bool(config.job_host))
    if config.job_host and args.rdzv_backend != "static":
        raise ConfigError(
            f"--odyssey-job-host {config.job_host} says where the nodes meet, and so does --rdzv-backend "
            f"{args.rdzv_backend}. Leave one of them out."
        )
    if joins and not config.job_host and (nodes == 1 or args.node_rank == 0):
        raise ConfigError(
            "odyssey join replaces a lost node, but the first node hosts the job: with it the job has ended "
            "(--odyssey-job-host has jobs hosted elsewhere). Ranks that die on a living node are started again with "
            "--odyssey-respawn."
        )
    modules = [one for one in args.preload.split(",") if one]
    if modules and config.device != "cpu":
        raise ConfigError(
            "--preload forks the ranks from one process, and CUDA does not survive a fork. Leave it out, or "
            "train on the CPU with --odyssey-device cpu."
        )
    line.check_script(args)
    # While this process has a single thread. Ranks find modules beside their script, such as a checkout's megatron.
    folder = os.path.dirname(os.path.abspath(args.training_script))
    zygote = Zygote.start(modules, folder) if modules else None
    try:
        run_folder.prepare(Path(config.run_dir))
        return _launch(args, config, nodes, token, zygote, joins, launched_s)
    finally:
        if zygote is not None:
            zygote.close()


def _launch(
    args: Any,
    config: OdysseyConfig,
    nodes: int,
    token: str,
    zygote: Zygote | None,
    joins: bool,
    launched_s: float,
) -> int:
    with signals.heeded_behind():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.launcher import api

        from odyssey_megatron.launch.agent.agent import Launch, OdysseyAgent
        from odyssey_megatron.launch.wire import admission, local_rendezvous
        from odyssey_megatron.policy.planner import PolicyPlanner

    if config.mode != "off":  # the entry module brings Odyssey into an unmodified Megatron-LM script
        args.training_script_args = [args.training_script, *args.training_script_args]
        args.training_script, args.module = _ENTRY, True
    if nodes == 1 and not config.job_host:
        local_rendezvous.register()
        _use_local_rendezvous(args, local_rendezvous.BACKEND)
    if args.rdzv_backend == "static":
        meeting = line.meeting(args, config, nodes=nodes, token=token)
        admission.register(meeting)
        args.rdzv_backend, args.rdzv_endpoint = admission.BACKEND, f"{meeting.host}:{meeting.port}"
        args.node_rank = 0  # the meeting knows it; torchrun would warn that it ignores it
    admission.bind_c10d(config.bind)
    # Not all versions of torch have such arguments.
    copies = any(getattr(args, f"duplicate_{one}_filters", None) for one in ("stdout", "stderr"))
    if not args.log_dir and {str(args.redirects), str(args.tee)} == {"0"} and not copies:
        args.log_dir = os.devnull  # otherwise torch leaves an empty folder behind for each job
    args.signals_to_handle = signals.not_ignored(args.signals_to_handle)
    on_signal = os.environ["ODYSSEY_ON_SIGTERM"] = line.on_signal(config, nodes, args.training_script_args)
    launch = Launch(
        config=config,
        token=token,
        page_secret=os.environ.get("ODYSSEY_TOKEN", ""),
        on_signal=on_signal,
        terminate_s=getattr(args, "shutdown_timeout", None),  # not in all versions of torch
        by_signal_s=line.by_signal_s(config),
        planner=PolicyPlanner(config),
        launched_s=launched_s,
        zygote=zygote,
        joins=joins,
    )
    settings, command, its_arguments = line.for_torch(args)
    original = api.LocalElasticAgent
    api.LocalElasticAgent = functools.partial(OdysseyAgent, launch=launch)  # type: ignore[misc, assignment]
    try:
        api.elastic_launch(settings, command)(*its_arguments)
    except SystemExit as verdict:
        return int(verdict.code or 0)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    finally:
        api.LocalElasticAgent = original  # type: ignore[misc]
    return 0


def _check_injections(config: OdysseyConfig, nodes: int, per_node: str) -> None:
    if not per_node.isdecimal():
        return  # "gpu", "auto": torchrun counts devices
    world_size = nodes * int(per_node)
    for rank in (rank for one in config.injections for rank in one.ranks):
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"--odyssey-inject names rank {rank}, but the job has ranks 0 to {world_size - 1} "
                f"({nodes} node(s) of {per_node}). Name one of those."
            )


def _use_local_rendezvous(args: Any, backend: str) -> None:
    """Use a store on loopback, as no other machine needs to reach it, unless the user chose a rendezvous."""
    chosen = args.rdzv_endpoint or args.master_port is not None or args.rdzv_backend != "static"
    if args.standalone or not chosen:
        args.standalone, args.rdzv_backend, args.rdzv_endpoint = False, backend, "127.0.0.1:0"
        args.rdzv_id = "odyssey"
