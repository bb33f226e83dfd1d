"""The process that serves a job's page: whom it answers elsewhere than on loopback, and when it ends."""

from __future__ import annotations

import contextlib
import socket
import urllib.error
import urllib.request
from pathlib import Path

from odyssey_megatron.launch.agent.onlookers import page_token
from tests.launch.jobserver import wait_for


def answer(port: int, token: str = "") -> int | None:
    """The status of the page's answer; None if nobody listens."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Authorization": f"Bearer {token}"})
    with contextlib.suppress(ConnectionError, urllib.error.URLError):
        try:
            with urllib.request.urlopen(asked, timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
    return None


def environment_of(port: int) -> bytes:
    """That of the process which serves the page at ``port``."""
    (found,) = (
        path
        for path in Path("/proc").glob("[0-9]*")
        if f"--page-port\0{port}\0".encode() in contents(path / "cmdline")
    )
    return contents(found / "environ")


def contents(path: Path) -> bytes:
    with contextlib.suppress(OSError):  # the process has ended
        return path.read_bytes()
    return b""


def test_a_page_for_others_wants_a_token_and_goes_with_an_agent_that_is_killed(toy, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    flags = ("--odyssey-page-port", port, "--odyssey-page-bind", "0.0.0.0")
    job = toy(2, "--steps", 30, "--hold", tmp_path / "go", *flags, ODYSSEY_TOKEN="a secret of the user")
    wait_for(lambda: answer(port) is not None, 30, "somebody answers")
    assert answer(port) == answer(port, "a secret of the user") == 401
    token = page_token("a secret of the user")
    assert answer(port, token) == 200
    known = environment_of(port)
    assert b"ODYSSEY_TOKEN=" not in known, "the job's secret, which is not the user's"
    assert b"a secret of the user" not in known
    wait_for(lambda: f":{port}/?token={token}" in job.log(), 10, "the log says the address")
    job.kill()
    wait_for(lambda: answer(port) is None, 10, "the page goes with the job")
