"""What goes wrong around a job that runs: it is frozen as a whole, its disk is full, its run folder is gone, strangers
connect. Each is a context: it is wrong in the body, and for a moment after it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.surroundings.conftest import Disk
from tests.surroundings.trees import go_on, stop, tree

DISK_MIB = 64


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Disk]:
    """A disk of its own for the run folder. Needs root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", path], check=True)
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", path], check=True)


class Around:
    """The surroundings of one job.

    Args:
        agent: its agent's pid.
        run_dir: on ``disk``.
    """

    def __init__(self, agent: int, run_dir: Path, disk: Disk, rng: random.Random):
        self._agent, self._run_dir, self._disk, self._random = agent, run_dir, disk, rng
        self._deck: list[Callable[[], contextlib.AbstractContextManager[None]]] = []
        self.happened: list[str] = []

    def any(self) -> contextlib.AbstractContextManager[None]:
        """One of them; each comes up as often as the others."""
        if not self._deck:
            self._deck = [self.frozen, self.full_disk, self.deleted_folder, self.strangers]
            self._random.shuffle(self._deck)
        happens = self._deck.pop()
        self.happened.append(happens.__name__)
        return happens()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """All its processes stand still, for longer than a rank may be silent and a message may take."""
        pids = tree(self._agent)
        self._random.shuffle(pids)
        stop(pids)
        yield
        time.sleep(self._random.uniform(1.0, 4.0))
        self._random.shuffle(pids)
        go_on(pids)

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        self._disk.fill()
        yield
        time.sleep(self._random.uniform(0.5, 2.0))
        self._disk.free()
        time.sleep(1.5)  # until what waits is written

    @contextlib.contextmanager
    def deleted_folder(self) -> Iterator[None]:
        with contextlib.suppress(FileNotFoundError):  # a rank that writes makes it anew meanwhile
            shutil.rmtree(self._run_dir)
        yield

    @contextlib.contextmanager
    def strangers(self) -> Iterator[None]:
        """Connections to all ports that the agent listens on: silent ones, and ones that say what makes no sense."""
        with contextlib.ExitStack() as stack:
            for port in listening(self._agent):
                for kind in range(8):
                    with contextlib.suppress(OSError):
                        line = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
                        line.sendall(self._said(kind))
            yield
            time.sleep(self._random.uniform(0.0, 1.0))

    def _said(self, kind: int) -> bytes:
        if kind < 2:
            return b""
        if kind == 2:
            return b"GET / HTTP/1.0\r\n\r\n"
        return self._random.randbytes(self._random.choice((1, 40, 4096, 1 << 18)))


def listening(pid: int) -> list[int]:
    """The ports that process ``pid`` listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):
                inodes.add(found[1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                ports.add(int(columns[1].rpartition(":")[2], 16))
    return sorted(ports)


def left_behind(pids: set[int], temporary: Path) -> list[str]:
    """Files of processes ``pids`` in shared memory, and all in ``temporary`` but the one
    cache of torch's.
    """
    shared = [
        str(path)
        for path in Path("/dev/shm").iterdir()
        if pids & {int(one) for one in re.findall(r"\d+", path.name)}
    ]
    return shared + [str(path) for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
