"""Starts the process beside the first agent that serves the job's page and metrics, from the run folder alone.

It is a process of its own, so that viewers neither take time from the coordinator nor reach it. It does not have the
job's secret, only one that is derived from it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.metrics.outlet import say
from odyssey_megatron.watch.command import prometheus_text
from odyssey_megatron.watch.serve import is_loopback, listen

_ENDS_S = 1.0


def page_token(secret: str) -> str:
    """Return the token that viewers need: the same in each job with ``secret``, which cannot be told from it."""
    return hmac.new(secret.encode(), b"odyssey page", hashlib.sha256).hexdigest()[:32]


class Onlookers:
    """The process for viewers. Its ports are opened at once, so that a taken port is known before anything is
    trained.
    """

    def __init__(self, config: OdysseyConfig, secret: str):
        """``secret`` is the user's; "" if there is none. Raises ConfigError."""
        self._run_dir, self._bind = Path(config.run_dir), config.page_bind
        self._token = "" if is_loopback(config.page_bind) else page_token(secret or secrets.token_hex(16))
        self._process: subprocess.Popen[bytes] | None = None
        self._listening: dict[str, socket.socket] = {}
        if config.metrics_port:
            prometheus_text()
        for what, port in (("page", config.page_port), ("metrics", config.metrics_port)):
            if port:
                self._listening[what] = listen(config.page_bind, port, f"--odyssey-{what}-port")

    def start(self) -> None:
        """Start the process, with only what it needs of this process's environment."""
        if not self._listening:
            return
        command = [sys.executable, "-m", "odyssey_megatron", "top", str(self._run_dir), "--bind", self._bind]
        for what, listening in self._listening.items():
            port = str(listening.getsockname()[1])
            command += [f"--{what}-port", port, f"--{what}-fd", str(listening.fileno())]
        kept = {
            name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG", "HOME") if name in os.environ
        }
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=[one.fileno() for one in self._listening.values()],
                env=kept | {"ODYSSEY_PAGE_TOKEN": self._token},
                start_new_session=True,  # Ctrl-C is for the job, which may go on for a while
            )
        except OSError as error:  # the job does not need it
            say(f"[odyssey] nobody can look at this job: its page cannot be started ({error}).")
        for listening in self._listening.values():
            listening.close()

    def close(self) -> None:
        """End the process by closing its stdin, which also happens if this process is killed."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
