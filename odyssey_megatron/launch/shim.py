"""Runs Odyssey under a launcher that ends all ranks when one dies: torchrun's own agent, or srun with one task per GPU.

The launcher starts one process per GPU. Each becomes a stand-in, which outlives the rank that it stands for: the first
of a node runs Odyssey's agent, which starts the node's ranks; the others wait for the verdict. All end with its exit
code, or with the launcher: without it nobody could end the job or would hear how it ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from odyssey_megatron.config import config_from_argv
from odyssey_megatron.errors import EXIT_BAD_INPUT, ConfigError
from odyssey_megatron.launch.process.open_files import open_standard_streams
from odyssey_megatron.launch.process.signals import HANDLED
from odyssey_megatron.launch.rank.environment import die_with

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_EVERY_S = 5.0
_STORE_S = 120.0
"""How long the store is waited for, and what other ranks put there at the start."""
_AFTER_RANK_0_S = 30.0
"""How much longer others wait than rank 0, which knows who is missing: with one, the launcher ends all of its node."""
_ASK_AGAIN_S = 0.5
_ROUND = "odyssey/round"
_NOT_STARTED = "the launcher has not started, or not anew as this one"
_UNANSWERED = (
    f"an answer of rank 0: it waits for other ranks, which it names in a line of its own, or {_NOT_STARTED}"
)
_WAITED = "rank {rank} has waited for {waited_s:.0f} s for {whom}."
_GIVES_UP = (
    "Look for the first error in the logs of all nodes. One possible cause: with --rdzv-backend static, its default, "
    "torchrun starts one node's processes anew without the others': give it --rdzv-backend c10d on all nodes, or start "
    "odyssey run itself, whose nodes come back by odyssey join."
)
_WAITS_ON = (
    "It goes on waiting. Look for the first error in the log, or for where a process hangs (py-spy dump)."
)
_FAREWELL_S = 10.0
"""How long the stand-in that hosts the store waits for the others to read the verdict."""
_ELSEWHERE = (
    "--odyssey-job-host: the launcher that has started this process waits for all of its own, the first node's too, "
    "and so would end the job with any of them. Start odyssey run itself on each node, one process each."
)
_LEFT_BEHIND = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # torchrun sets 1: NCCL's watchdog then ends a rank whose peer has died
)  # fmt: skip


def is_needed() -> bool:
    """Whether this process was started as a rank, but not by Odyssey's agent."""
    return "ODYSSEY_PARENT_PID" not in os.environ and {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= set(os.environ)


def become() -> NoReturn:
    """Replace this process by a stand-in for it."""
    # torch's store client warns, twice, whenever a wait for the verdict times out.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.execv(sys.executable, [sys.executable, "-u", "-m", __name__, *sys.argv])


def main(argv: Sequence[str]) -> int:
    """Stand in for a rank with the command line ``argv``; return the job's exit code."""
    die_with(os.getppid())  # and the ranks of a stand-in that runs the agent die with that one
    from torch.distributed import DistNetworkError, TCPStore

    env = os.environ
    try:
        rank, world_size, local_rank, per_node, port = _numbers(env)
    except ConfigError as error:
        sys.stderr.write(f"odyssey: {error}\n")
        return EXIT_BAD_INPUT
    nodes, node = world_size // per_node, rank // per_node
    torchrun_hosts = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = rank == 0 and not torchrun_hosts
    address = env.get("MASTER_ADDR", "127.0.0.1")
    where = (address, port)
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=_STORE_S)}
    store: Store
    if hosts:
        from odyssey_megatron.launch.wire.admission import hosted_store

        try:
            store = hosted_store(*where, config_from_argv(argv).bind, **options)
        except (ConfigError, DistNetworkError) as error:
            sys.stderr.write(f"odyssey: {error}\n")
            return EXIT_BAD_INPUT
    else:
        store = TCPStore(*where, is_master=False, **options)
    if torchrun_hosts:
        try:
            store = of_this_round(store, rank, world_size, _STORE_S, single_node=nodes == 1)
        except TimeoutError as error:
            sys.stderr.write(f"odyssey: {error}\n")
            return 1
    verdict, farewell = f"odyssey/verdict/{node}", "odyssey/farewell"
    if local_rank:
        for number in HANDLED:  # the agent's stand-in handles them; this one ends with the job
            signal.signal(number, signal.SIG_IGN)
        code = _await(store, verdict)
    else:
        code = _run(store, argv, nodes=nodes, node=node, per_node=per_node, address=address)
        store.set(verdict, str(code))
    with contextlib.suppress(RuntimeError):  # the launcher, which hosted the store, may have ended
        gone, ends_s = store.add(farewell, 1), time.monotonic() + _FAREWELL_S
        while hosts and gone < world_size and time.monotonic() < ends_s:
            time.sleep(0.1)
            gone = store.add(farewell, 0)
    return code


def of_this_round(store: Store, rank: int, world_size: int, limit_s: float, *, single_node: bool) -> Store:
    """Return the part of torchrun's ``store`` that is of the round in which this process was started.

    torchrun keeps its store over restarts, with the verdicts of the rounds before, and tells its processes no number of
    the round: TORCHELASTIC_RESTART_COUNT stays where nodes come or go, and differs between nodes if one has failed
    before the others. So rank 0 draws a name for the round. It gives the name to each other rank by the name which that
    one has drawn, because a name that lies in the store without being asked for may be of a round before.

    Raises:
        TimeoutError: A rank that is needed has not come, and there are several nodes. The message says what to do.
    """
    from torch.distributed import PrefixStore

    own = secrets.token_hex(8)
    if rank:
        name = _answer_of_rank_0(store, rank, own, limit_s, single_node)
    else:
        name = own
        _answer_others(store, world_size, own, limit_s, single_node)
    return PrefixStore(f"{_ROUND}/{name}", store)


def _answer_others(store: Store, world_size: int, own: str, limit_s: float, single_node: bool) -> None:
    began_s = time.monotonic()
    store.set(_ROUND, own)
    asked = {other: f"{_ROUND}/{own}/{other}" for other in range(1, world_size)}
    try:
        for key in asked.values():
            _get(store, key, began_s + limit_s)
    except TimeoutError:
        missing = [other for other, key in asked.items() if not store.check([key])]
        if missing:  # and has not come since
            _has_waited(0, f"rank(s) {missing}, which {_NOT_STARTED}", began_s, single_node)
    for other in [_get(store, key, math.inf) for key in asked.values()]:
        store.set(f"{_ROUND}/{other}", own)


def _answer_of_rank_0(store: Store, rank: int, own: str, limit_s: float, single_node: bool) -> str:
    began_s = time.monotonic()
    ends_s, newest, whom = began_s + limit_s, "", f"rank 0, which {_NOT_STARTED}"
    while True:
        with contextlib.suppress(TimeoutError):
            seen = _get(store, _ROUND, ends_s)
            if seen != newest:
                newest, whom, ends_s = seen, _UNANSWERED, time.monotonic() + limit_s + _AFTER_RANK_0_S
            store.set(f"{_ROUND}/{newest}/{rank}", own)
            return _get(store, f"{_ROUND}/{own}", min(time.monotonic() + _ASK_AGAIN_S, ends_s))
        if time.monotonic() >= ends_s:
            _has_waited(rank, whom, began_s, single_node)
            ends_s = math.inf


def _has_waited(rank: int, whom: str, began_s: float, single_node: bool) -> None:
    """Say on a single node for whom ``rank`` waits: all of a node's ranks are started together, however late they come.

    Raises:
        TimeoutError: There are several nodes, of which some may have been started anew without the others.
    """
    waited = _WAITED.format(rank=rank, waited_s=time.monotonic() - began_s, whom=whom)
    if not single_node:
        raise TimeoutError(f"{waited} {_GIVES_UP}") from None
    sys.stderr.write(f"odyssey: {waited} {_WAITS_ON}\n")


def _get(store: Store, key: str, ends_s: float) -> str:
    """Return the value of ``key`` once it is there.

    Raises TimeoutError if it is not at ``ends_s``, which may be infinite, or RuntimeError if the store is gone.
    """
    while True:
        left_s = min(ends_s - time.monotonic(), _LOOK_EVERY_S)
        try:
            store.wait([key], timedelta(seconds=max(left_s, 0.001)))
            return store.get(key).decode()
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise
        if time.monotonic() >= ends_s:
            raise TimeoutError(key)


def _numbers(env: Mapping[str, str]) -> tuple[int, int, int, int, int]:
    """Return rank, number of ranks, rank on its node, number of ranks of a node, and the first node's port.

    Raises:
        ConfigError: These are no numbers, or contradict each other. A node might have no agent then, and its stand-ins
            would wait for the verdict for ever.
    """
    on_node = env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_NTASKS_PER_NODE") or env["WORLD_SIZE"]
    said = {name: env.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    said["LOCAL_WORLD_SIZE"] = on_node
    values = ", ".join(f"{name}={value}" for name, value in said.items())
    try:
        rank, ranks, local_rank, port, per_node = map(int, said.values())
    except ValueError:
        raise ConfigError(
            f"the launcher that has started this process has set {values}: numbers are expected."
        ) from None
    if not (0 <= rank < ranks and per_node > 0 and ranks % per_node == 0 and rank % per_node == local_rank):
        raise ConfigError(
            f"the launcher that has started this process has set {values}: ranks are expected to be numbered node by "
            "node, as many on each, so that RANK modulo LOCAL_WORLD_SIZE is LOCAL_RANK. With srun that is "
            "--distribution=block and --ntasks-per-node."
        )
    return rank, ranks, local_rank, per_node, port


def _run(store: Store, argv: Sequence[str], *, nodes: int, node: int, per_node: int, address: str) -> int:
    from odyssey_megatron.launch import run

    arguments = ["--nproc-per-node", str(per_node)]
    if nodes > 1:
        if node == 0:
            store.set("odyssey/port", str(_free_port()))
        port = store.get("odyssey/port").decode()
        arguments += ["--nnodes", str(nodes), "--node-rank", str(node)]
        arguments += ["--master-addr", address, "--master-port", port]
    for name in [*_LEFT_BEHIND, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    try:
        if config_from_argv(argv).job_host:
            raise ConfigError(_ELSEWHERE)
        return run.main([*arguments, *argv])
    except ConfigError as error:
        sys.stderr.write(f"odyssey: {error}\n")
        return EXIT_BAD_INPUT


def _await(store: Store, key: str) -> int:
    try:
        return int(_get(store, key, math.inf))
    except RuntimeError:  # the store is gone, and the launcher with it
        return 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    open_standard_streams()
    _code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)  # torch's threads must not delay the end, or change the exit code
