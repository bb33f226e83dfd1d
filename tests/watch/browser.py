"""A real browser and a real Prometheus, where they are installed (Debian has both: ``chromium``, ``prometheus``)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.jobserver import wait_for


def program(*names: str) -> str:
    """The path of the first that is installed; the test is skipped if none is."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"needs {names[0]}: apt-get install {names[0]}")
    return found


def shown(url: str, folder: Path, *, wait_ms: int = 3000) -> str:
    """The document at ``url`` as a browser has it when its scripts have run for ``wait_ms`` of its own time."""
    command = [
        program("chromium", "chromium-browser", "google-chrome"),
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'browser'}", f"--virtual-time-budget={wait_ms}", "--dump-dom", url,
    ]  # fmt: skip
    # It puts sockets there, and where TMPDIR is no folder Python looks elsewhere, but a browser does not.
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


class Prometheus:
    """One that scrapes ``target`` every half a second."""

    def __init__(self, port: int):
        self._at = f"http://127.0.0.1:{port}/api/v1/query?"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What it answers now: a list of series."""
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(
                self._at + urllib.parse.urlencode({"query": expression}), timeout=5
            ) as reply:
                return list(json.load(reply)["data"]["result"])
        return []

    def value(self, expression: str) -> float | None:
        """Of the only series."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if len(found) == 1 else None

    def wait_for(self, expression: str, timeout_s: float = 30.0) -> list[dict[str, Any]]:
        return list(wait_for(lambda: self.query(expression), timeout_s, expression))


@contextlib.contextmanager
def prometheus(target: str, port: int, folder: Path, token: str = "") -> Iterator[Prometheus]:
    """A server of its own, with its data in ``folder``; Debian's needs no root."""
    binary = program("prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    wants = f"\n    authorization: {{credentials: {token}}}" if token else ""
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 400ms}\n"
        f"scrape_configs:\n  - job_name: odyssey\n    static_configs: [{{targets: ['{target}']}}]{wants}\n"
    )
    command = [
        binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
