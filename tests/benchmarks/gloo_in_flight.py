"""When a gloo operation ends whose connection is shut down while a part of it has arrived. torch alone.

    python tests/benchmarks/gloo_in_flight.py [--limit-s 5]

Two processes have a group of torch's. One is stopped in the middle of what it sends. The other shuts its connections
down, as ``rebuild/abort_gloo.py`` does, and drops the group. For a message and for a sum this prints the seconds until
the wait for the operation and the destructor of the group ended, and the threads that were left after one second. A sum
consists of many messages, and only fails to end if one of them has arrived in part, so it mostly ends at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PAYLOAD_BYTES = 256 * 2**20
"""More than fits into the buffers of a connection."""
LOOK_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit-s", type=float, default=5.0, help="of an operation")
    limit_s = parser.parse_args().limit_s
    for kind in ("message", "sum"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = [
            multiprocessing.get_context("spawn").Process(target=run, args=(rank, port, kind, limit_s))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        ranks[0].join()
        ranks[1].kill()
        ranks[1].join()


def run(rank: int, port: int, kind: str, limit_s: float) -> None:
    """One of the two processes: rank 1 stops while it sends, rank 0 measures."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    others, before = threads(), set(os.listdir("/proc/self/fd"))
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._threads, options._timeout = 2, timedelta(seconds=limit_s)
    group = dist.ProcessGroupGloo(store, rank, 2, options)
    tensor = torch.full((PAYLOAD_BYTES // 4,), float(rank))
    if rank == 1:
        store.set("pid", str(os.getpid()))
        work = group.allreduce([tensor]) if kind == "sum" else group.send([tensor], 0, 0)
        work.wait()
        return
    other = int(store.get("pid"))
    work = group.allreduce([tensor]) if kind == "sum" else group.recv([tensor], 1, 0)
    while not tensor[:: 2**14].any():  # until some of it is here
        pass
    os.kill(other, signal.SIGSTOP)
    ended_s: dict[str, float] = {}
    began_s = time.monotonic()

    def timed(name: str, function: Any) -> threading.Thread:
        def call() -> None:
            try:
                function()
            except RuntimeError:
                pass  # at its limit
            ended_s[name] = time.monotonic() - began_s

        thread = threading.Thread(target=call)
        thread.start()
        return thread

    waits = timed("wait", work.wait)
    time.sleep(0.2)
    shut_down(before)
    group = [group].clear  # the last reference
    drops = timed("destructor", group)
    time.sleep(LOOK_S)
    left = threads() - others
    for thread in (waits, drops):
        thread.join()
    print(
        f"{kind} (limit {limit_s:.1f} s): wait ended after {ended_s['wait']:.1f} s, destructor after "
        f"{ended_s['destructor']:.1f} s; after {LOOK_S:.0f} s there are still {dict(left)}"
    )


def shut_down(before: set[str]) -> None:
    """Shut down all connections opened since ``before``."""
    for fd in set(os.listdir("/proc/self/fd")) - before:
        try:
            with socket.socket(fileno=os.dup(int(fd))) as one:
                if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not a connection


def threads() -> Counter[str]:
    """The threads of this process by name; one of Python's is called as the program."""
    return Counter(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


if __name__ == "__main__":
    main()
