"""Two hosts on one machine: network namespaces with a router between them, which can fall silent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launch.jobserver import CHECKOUT

PORT = 29500
ADDRESSES = ("10.203.0.2", "10.203.1.2")
_GATEWAYS = ("10.203.0.1", "10.203.1.1")


def needs_namespaces() -> pytest.MarkDecorator:
    """Skips a test where this user may not make network namespaces."""
    able = shutil.which("ip") and os.geteuid() == 0
    able = able and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0
    return pytest.mark.skipif(not able, reason="needs root, iproute2 and network namespaces")


@dataclass
class Hosts:
    """``start(0, ...)`` and ``start(1, ...)`` run commands on them; ``cut()`` drops every packet between them."""

    name: str = field(default_factory=lambda: f"ody{os.getpid()}")
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Hosts:
        self._ip("netns", "add", self._router)
        self._in(self._router, "ip", "link", "set", "lo", "up")
        for host in range(2):
            namespace, wire = self.namespace(host), f"w{host}"
            self._ip("netns", "add", namespace)
            self._ip(
                "link",
                "add",
                wire,
                "netns",
                self._router,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                namespace,
            )
            for where, device, address in (
                (self._router, wire, _GATEWAYS[host]), (namespace, "eth0", ADDRESSES[host]),
            ):  # fmt: skip
                self._ip("-n", where, "addr", "add", f"{address}/24", "dev", device)
                self._ip("-n", where, "link", "set", device, "up")
            self._ip("-n", namespace, "link", "set", "lo", "up")
            self._ip("-n", namespace, "route", "add", "default", "via", _GATEWAYS[host])
        self.forward(True)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for namespace in (self._router, self.namespace(0), self.namespace(1)):
            subprocess.run(["ip", "netns", "del", namespace], check=False)

    @property
    def _router(self) -> str:
        return f"{self.name}r"

    def namespace(self, host: int) -> str:
        return f"{self.name}h{host}"

    def start(
        self, host: int, argv: list[object], *, log: Path, before: tuple[str, ...] = (), **env: str
    ) -> subprocess.Popen[bytes]:
        """``python argv`` on a host, in a session of its own; ``before``: a command that runs it."""
        path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # The machine's name leads to none of these hosts: ranks find out by themselves where others reach them.
        whole = {
            **{name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"},
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            **env,
        }
        command = ["ip", "netns", "exec", self.namespace(host), *before, sys.executable, *map(str, argv)]
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=whole, stdout=out, stderr=out, start_new_session=True)
        self.processes.append(process)
        return process

    def forward(self, on: bool) -> None:
        """Whether packets pass between the hosts; nobody is told of those that do not."""
        self._in(self._router, "sh", "-c", f"echo {int(on)} > /proc/sys/net/ipv4/ip_forward")

    def pids(self, host: int) -> list[int]:
        """Of all processes on a host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace(host)], check=True, capture_output=True, text=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def lose_power(self, host: int) -> None:
        """From now on nothing comes from that host, and nothing runs there."""
        self.forward(False)
        for pid in self.pids(host):
            os.kill(pid, signal.SIGKILL)

    def _in(self, namespace: str, *command: str) -> None:
        self._ip("netns", "exec", namespace, *command)

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)
