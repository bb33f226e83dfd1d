"""Reads the part of a launch line before the script: torchrun's arguments, with torchrun's own parser."""

from __future__ import annotations

import argparse
import functools
import os
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from odyssey_megatron.config import BEHIND_SCRIPT, OdysseyConfig, add_arguments, strange_variables
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import COUNT, Between, Parser, read_text
from odyssey_megatron.launch.process import signals
from odyssey_megatron.metrics.outlet import say

if TYPE_CHECKING:
    from odyssey_megatron.launch.wire.admission import Meeting

_NODES = Between(1, 100_000, whole=True)
_PER_NODE = Between(1, 1024, whole=True)
_PORT = 29500
"""torchrun's default port of the first node."""
_SHUTDOWN = Between(0, 1_000_000, whole=True)
_SHUTDOWN_S = 30
"""torchrun's default of --shutdown-timeout, for versions of torch that do not have that flag."""
LEAST_TORCH = (2, 11)
"""The oldest version of torch, as in pyproject.toml, which has no effect in containers with a torch of their own. 2.8
lacks torchrun's argument for signals, and the function that takes a group out of torch's tables.
"""


def check_torch(version: str) -> None:
    """Raise ConfigError if ``version`` of torch is too old."""
    found = tuple(int(one) for one in re.findall(r"\d+", version)[:2])
    if found < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ConfigError(
            f"torch {version} is too old: Odyssey needs {least} or newer. pip install 'torch>={least}', or use a newer "
            "container."
        )


def parse(argv: Sequence[str], prog: str) -> Any:
    """Return torchrun's arguments, and ours before the script. Ends the process if there is an unknown one."""
    with signals.heeded_behind():
        from torch import __version__ as torch_version
        from torch.distributed.run import get_args_parser

        from odyssey_megatron.launch.wire.verdict import ENDS_S, TERMINATE_S

    check_torch(torch_version)
    parser = get_args_parser()
    parser.prog = prog
    parser.add_argument(
        "--preload",
        default=os.environ.get("ODYSSEY_PRELOAD", ""),
        metavar="MODULE[,MODULE...]",
        help="import these once and fork the ranks from there (CPU only): seconds less to start each. Default: those "
        "in the variable ODYSSEY_PRELOAD",
    )
    for action in parser._actions:
        action.type = _TYPES.get(action.dest, action.type)
        if action.dest in _HELP:
            action.help = _HELP[action.dest].format(by_signal_s=TERMINATE_S, otherwise_s=ENDS_S)
    parser.error = functools.partial(_refuse, parser)  # type: ignore[method-assign]
    parser.format_help = functools.partial(_help, parser)  # type: ignore[method-assign]
    args = parser.parse_args(list(argv))
    for dest, why in _MOOT.items():
        if getattr(args, dest) != parser.get_default(dest):
            say(f"[odyssey] --{dest.replace('_', '-')} changes nothing here: {why}.")
    return args


def say_what_is_ignored(config: OdysseyConfig, script: str) -> None:
    """Tell people of settings and variables that change nothing for ``script``."""
    if config.mode == "off" and config.given and not _joins_by_itself(script):
        say(
            f"[odyssey] {', '.join(config.given)}: given without --odyssey, so that the job does not survive any loss. "
            "Only a script that joins the job by itself (TrainingJob) needs no --odyssey."
        )
    for name, meant in strange_variables(os.environ).items():
        is_meant = f"; is {meant} meant?" if meant else "."
        say(f"[odyssey] the variable {name} is unknown and changes nothing{is_meant}")


def _joins_by_itself(script: str) -> bool:
    """Whether ``script`` names this package, or cannot be read, as where it is a module."""
    try:
        return "odyssey_megatron" in read_text(script)
    except ValueError:
        return True


def _refuse(parser: Any, message: str) -> NoReturn:
    """Refuse the arguments with ``message``, explained if an Odyssey flag stands before the script."""
    if "arguments: --odyssey" in message:
        message += f": {BEHIND_SCRIPT}"
    Parser.error(parser, message)


def _help(parser: Any) -> str:
    ours = Parser(
        usage=argparse.SUPPRESS, description="behind the script, with its own flags:", add_help=False
    )
    add_arguments(ours)
    return f"{argparse.ArgumentParser.format_help(parser)}\n{ours.format_help()}"


def _per_node(text: str) -> str:
    """Check ``text``: a number of ranks, or the kind of device that torchrun is to count."""
    return text if text in ("auto", "cpu", "gpu", "xpu") else str(_PER_NODE(text))


def _redirects(text: str) -> str:
    """Check ``text``: which outputs of which ranks to redirect, in torchrun's notation."""
    if not re.fullmatch(r"[0-3]|(\d:[0-3],)*\d:[0-3]", text):
        raise argparse.ArgumentTypeError(
            f"0 to 3, or RANK:0 to 3 with commas between, is expected, found {text!r}"
        )
    return text


def _signals(text: str) -> str:
    """Check ``text``: names of signals, with commas between."""
    for name in text.split(","):
        if name not in signal.Signals.__members__:
            raise argparse.ArgumentTypeError(f"names as in SIGTERM,SIGUSR1 are expected, found {name!r}")
    return text


def _event_log_handler(text: str) -> str:
    """Check ``text``: where torch writes down what its agent does."""
    from torch.distributed.elastic.events import get_logging_handler

    try:
        get_logging_handler(text)
    except KeyError:
        raise argparse.ArgumentTypeError(
            f"a handler that torch knows, as null or console, is expected, found {text!r}"
        ) from None
    return text


_TYPES: dict[str, Callable[[str], Any]] = {
    "nproc_per_node": _per_node,
    "node_rank": Between(0, _NODES.high - 1, whole=True),
    "master_port": Between(0, 65_535, whole=True),
    "max_restarts": COUNT,
    "monitor_interval": Between(0.001, 3600),
    "shutdown_timeout": _SHUTDOWN,
    "redirects": _redirects,
    "tee": _redirects,
    "signals_to_handle": _signals,
    "event_log_handler": _event_log_handler,
}
"""Checks for arguments that torchrun would not check itself, or would refuse with a traceback."""
_MOOT = {
    "max_restarts": "ranks are not started again all together; --odyssey-respawn starts those again that die",
    "monitor_interval": "the end of a rank is noticed at once",
    "signals_to_handle": f"{', '.join(one.name for one in signals.HANDLED)} always ask the job to end, in the way that "
    "--odyssey-on-sigterm says",
}
"""torchrun's arguments that this launcher takes and does not heed, and why."""
_HELP = {
    "nnodes": "Number of nodes. Nodes that are lost later are survived; a range of numbers is refused.",
    "shutdown_timeout": "Time in seconds from SIGTERM to SIGKILL when ranks that still run are ended; after a second "
    "signal there is none. Default: {by_signal_s:g} if a signal ends the job (torchrun's time without --odyssey and "
    "with --odyssey observe), {otherwise_s:g} if it cannot go on.",
    **{dest: f"Changes nothing: {why}." for dest, why in _MOOT.items()},
}
"""Help on torchrun's arguments that mean something else here."""


def check_script(args: Any) -> None:
    """Raise ConfigError if what the ranks are to run cannot be started in processes of their own."""
    script = args.training_script
    if args.run_path:
        raise ConfigError(
            "--run-path runs the script within the launcher's own interpreter, and each rank has to be a process that "
            "can be lost alone. Leave it out."
        )
    if args.no_python and not shutil.which(script):
        raise ConfigError(
            f"--no-python {script}: there is no such program that may be executed. Make it executable (chmod +x), or "
            "leave out --no-python for a script of Python's."
        )
    if not (args.module or args.no_python or Path(script).is_file()):
        raise ConfigError(f"{script}: there is no such script. Name one, or a module with -m.")


def for_torch(args: Any) -> tuple[Any, Any, list[str]]:
    """Return torchrun's settings for its agent, the command of a rank, and its arguments.

    Raises ConfigError for what torch would refuse with a traceback.
    """
    import torch
    from torch.distributed.elastic.rendezvous import registry
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import config_from_args

    backends = registry.handler_registry._registry
    if args.rdzv_backend not in backends:
        # Ours are chosen for the user.
        known = ", ".join(sorted(name for name in backends if not name.startswith("odyssey")))
        raise ConfigError(f"--rdzv-backend {args.rdzv_backend} is unknown; torch knows {known}.")
    if getattr(args, "numa_binding", None) and not torch.cuda.is_available():
        raise ConfigError(
            f"--numa-binding {args.numa_binding} binds ranks to the cores beside their GPUs, and torch sees no GPU "
            "here. Leave it out."
        )
    try:
        if args.rdzv_backend == "c10d":  # it would read the endpoint only later
            parse_rendezvous_endpoint(args.rdzv_endpoint, _PORT)
        return config_from_args(args)
    except (ValueError, OSError) as error:
        raise ConfigError(f"torchrun refuses its arguments: {error}") from error


def number_of_nodes(args: Any) -> int:
    """Return the number of nodes. Raises ConfigError for a range, as a job starts with all of its nodes."""
    least, _, most = str(args.nnodes).partition(":")
    if most and most != least:
        raise ConfigError(
            f"--nnodes {args.nnodes}: the job starts with a fixed number of nodes. Give one number; nodes "
            "lost later are survived."
        )
    try:
        return int(_NODES.read(least))
    except ValueError as error:
        raise ConfigError(f"--nnodes {args.nnodes}: {error}.") from None


def meeting(args: Any, config: OdysseyConfig, *, nodes: int, token: str, hosts: bool = False) -> Meeting:
    """Return where the agents of a job meet. Raises ConfigError.

    Args:
        hosts: Whether this is ``odyssey host``, which hosts the job and is none of its nodes.
    """
    from odyssey_megatron.launch.wire.admission import Meeting

    node = args.node_rank
    if apart := config.job_host:
        said, where = apart, "--odyssey-job-host HOST:PORT, the same on all nodes and for odyssey host"
        host, colon, port = apart.rpartition(":")
        if (
            not colon or "]" in port or (":" in host and not host.endswith("]"))
        ):  # no port, or a bare IPv6 address
            host, port = apart, str(_PORT)
    else:
        said, where = args.rdzv_endpoint, "--master-addr and --master-port"
        host, _, port = (said or f"{args.master_addr}:{args.master_port or _PORT}").rpartition(":")
    if not (host and port.isdigit() and int(port) < 65_536):
        raise ConfigError(
            f"cannot read a host and a port in {said!r}. Say where the agents meet with {where}."
        )
    return Meeting(
        host=host.strip("[]"),
        port=int(port),
        node=node,
        nodes=nodes,
        token=token,
        bind=config.bind,
        lease_s=config.node_lease_s,
        hosts=hosts or (node == 0 and not apart),
        is_apart=bool(apart),
        observes=config.mode == "observe",
    )


def token(*, several: bool) -> str:
    """Return the job's secret, without which no message is accepted; ``several`` says whether several machines take
    part.
    """
    secret = os.environ.get("ODYSSEY_TOKEN", "")
    if not secret and several:
        raise ConfigError(
            "a job of several machines needs a secret that its agents know each other by. Set the variable "
            'ODYSSEY_TOKEN to the same value on all of them, e.g. the output of "openssl rand -hex 16".'
        )
    # On one node no one else needs to know the secret. With a new one, messages of another job are worth nothing.
    return secret if several else secrets.token_hex(16)


def by_signal_s(config: OdysseyConfig) -> float:
    """Return the seconds from SIGTERM to SIGKILL if a signal ends the job and ``--shutdown-timeout`` is not given:
    torchrun's where ranks run as under torchrun. Raises ConfigError.
    """
    from odyssey_megatron.launch.wire.verdict import TERMINATE_S

    if config.mode == "recover":
        return TERMINATE_S
    # As torch 2.13 distributed/launcher/api.py does, whose LaunchConfig would leave a folder behind each time.
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    try:
        return float(_SHUTDOWN.read(os.environ.get(name, str(_SHUTDOWN_S))))
    except ValueError as error:
        raise ConfigError(f"the variable {name}: {error}.") from None


def on_signal(config: OdysseyConfig, nodes: int, script_args: Sequence[str]) -> str:
    """Return what the first signal to this launcher asks of the job. Raises ConfigError."""
    saves = any(one.partition("=")[0] == "--save" for one in script_args)
    how = config.on_sigterm if config.on_sigterm != "auto" else "save" if saves else "stop"
    if how == "leave" and nodes == 1:
        raise ConfigError(
            "--odyssey-on-sigterm leave: with one node nobody is left to go on. Use save, or leave it out."
        )
    return "stop" if config.mode == "observe" else how
