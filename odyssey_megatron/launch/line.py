"""What a launch line says before its script: torchrun's arguments, read with torchrun's own parser."""

from __future__ import annotations

import argparse
import functools
import os
import re
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from odyssey_megatron.config import OdysseyConfig, add_arguments
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import COUNT, Between, Parser
from odyssey_megatron.launch import signals

if TYPE_CHECKING:
    from odyssey_megatron.launch.admission import Meeting

_NODES = Between(1, 100_000, whole=True)
_PER_NODE = Between(1, 1024, whole=True)
_PORT = 29500
"""torchrun's, of the first node."""
LEAST_TORCH = (2, 11)
"""As in pyproject.toml, which containers that bring their own do not read. 2.8 has neither what torchrun is told of
signals nor what takes a group out of torch's tables.
"""


def check_torch(version: str) -> None:
    """Raises ConfigError if it is too old."""
    found = tuple(int(one) for one in re.findall(r"\d+", version)[:2])
    if found < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ConfigError(
            f"torch {version} is too old: Odyssey needs {least} or newer. pip install 'torch>={least}', or use a newer "
            "container."
        )


def parse(argv: Sequence[str], prog: str) -> Any:
    """Torchrun's arguments, and ours before the script; ends the process where there is one that it does not know."""
    with signals.heeded_behind():
        from torch import __version__ as torch_version
        from torch.distributed.run import get_args_parser

    check_torch(torch_version)
    parser = get_args_parser()
    parser.prog = prog
    parser.add_argument(
        "--preload",
        default=os.environ.get("ODYSSEY_PRELOAD", ""),
        metavar="MODULE[,MODULE...]",
        help="import these once and fork the ranks from there (CPU only): seconds less to start each",
    )
    for action in parser._actions:
        if action.dest in _TYPES:
            action.type = _TYPES[action.dest]
    parser.error = functools.partial(_refuse, parser)  # type: ignore[method-assign]
    parser.format_help = functools.partial(_help, parser)  # type: ignore[method-assign]
    return parser.parse_args(list(argv))


def _refuse(parser: Any, message: str) -> NoReturn:
    """Raises ConfigError."""
    if "arguments: --odyssey" in message:
        message += (
            ": what is before the script is for the launcher, and Odyssey's flags come behind the script"
        )
    Parser.error(parser, message)


def _help(parser: Any) -> str:
    ours = Parser(
        usage=argparse.SUPPRESS, description="behind the script, with its own flags:", add_help=False
    )
    add_arguments(ours)
    return f"{argparse.ArgumentParser.format_help(parser)}\n{ours.format_help()}"


def _per_node(text: str) -> str:
    """A number, or what torchrun counts."""
    return text if text in ("auto", "cpu", "gpu", "xpu") else str(_PER_NODE(text))


def _redirects(text: str) -> str:
    """Of ranks' outputs, as torchrun has it."""
    if not re.fullmatch(r"[0-3]|(\d:[0-3],)*\d:[0-3]", text):
        raise argparse.ArgumentTypeError(
            f"0 to 3, or RANK:0 to 3 with commas between, is expected, found {text!r}"
        )
    return text


_TYPES: dict[str, Callable[[str], Any]] = {
    "nproc_per_node": _per_node,
    "node_rank": Between(0, _NODES.high - 1, whole=True),
    "master_port": Between(0, 65_535, whole=True),
    "max_restarts": COUNT,
    "monitor_interval": Between(0.001, 3600),
    "shutdown_timeout": Between(0, 1_000_000, whole=True),
    "redirects": _redirects,
    "tee": _redirects,
}
"""Of torchrun's arguments, which it would not check, or with a traceback."""


def number_of_nodes(args: Any) -> int:
    """The number of nodes. Raises ConfigError for a range: membership starts complete; and for a node beyond."""
    least, _, most = str(args.nnodes).partition(":")
    if most and most != least:
        raise ConfigError(
            f"--nnodes {args.nnodes}: the job starts with a fixed number of nodes. Give one number; nodes "
            "lost later are survived."
        )
    try:
        nodes = int(_NODES.read(least))
    except ValueError as error:
        raise ConfigError(f"--nnodes {args.nnodes}: {error}.") from None
    if args.node_rank >= nodes:
        raise ConfigError(
            f"--node-rank {args.node_rank}: --nnodes {nodes} has the node ranks 0 to {nodes - 1}."
        )
    return nodes


def meeting(args: Any, config: OdysseyConfig, *, nodes: int, token: str, hosts: bool = False) -> Meeting:
    """Where the agents of a job meet. Raises ConfigError.

    Args:
        hosts: for ``odyssey host``, which is none of the nodes.
    """
    from odyssey_megatron.launch.admission import Meeting

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
    )


def token(*, several: bool) -> str:
    """The job's secret: who does not have it is not listened to. ``several``: machines take part."""
    secret = os.environ.get("ODYSSEY_TOKEN", "")
    if not secret and several:
        raise ConfigError(
            "a job of several machines needs a secret that its agents know each other by. Set the variable "
            'ODYSSEY_TOKEN to the same value on all of them, e.g. the output of "openssl rand -hex 16".'
        )
    # One node has nobody to tell it to, and what was recorded in another job is worth nothing then.
    return secret if several else secrets.token_hex(16)


def on_signal(config: OdysseyConfig, nodes: int, script_args: Sequence[str]) -> str:
    """What the first signal to this launcher begins. Raises ConfigError."""
    saves = any(one.partition("=")[0] == "--save" for one in script_args)
    how = config.on_sigterm if config.on_sigterm != "auto" else "save" if saves else "stop"
    if how == "leave" and nodes == 1:
        raise ConfigError(
            "--odyssey-on-sigterm leave: with one node nobody is left to go on. Use save, or leave it out."
        )
    return "stop" if config.mode == "observe" else how
