"""A real job that is looked at while it runs: in a terminal, with a browser, and by a Prometheus."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.watch.newest import Newest
from tests.e2e.jobs import SCRIPT
from tests.launch.jobserver import wait_for
from tests.watch.browser import prometheus, shown


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports


@pytest.fixture(scope="module")
def job(jobs):
    """(run folder, port of the page, of the metrics): four ranks of which one has hung, and which go on training."""
    page, metrics = free_ports(2)
    flags = (
        "--train-iters 100000 --odyssey-on-sigterm save --odyssey-profile-steps 2 "
        "--odyssey-inject rank=3,step=12,at=backward,signal=STOP "
        f"--odyssey-page-port {page} --odyssey-metrics-port {metrics}"
    )
    argv = ["--nproc-per-node", "4", str(SCRIPT), *jobs.flags("watched", stages=2), *flags.split()]
    running = jobs.server.run(argv, log=jobs.folder / "watched.log")
    folder = jobs.folder / "watched"
    wait_for((folder / "journal" / "agent0.jsonl").exists, 30, "the job has begun")
    newest = Newest(folder)
    wait_for(
        lambda: newest.get().status == "trains" and newest.get().costs and newest.get().stalls,
        60,
        "it goes on",
    )
    yield folder, page, metrics
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(60) == 92, running.log()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{page}/", timeout=5)


def top(folder, *arguments: str) -> str:
    command = [sys.executable, "-m", "odyssey_megatron", "top", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def survives(folder) -> int:
    """How many of the holders of any layer may go, by the plan in force; rank 3 has gone."""
    events = list(read_journal(folder))
    begun = max(one["generation"] for one in events if one["event"] == "generation_started")
    (layout,) = (e["layout"] for e in events if e["event"] == "decision" and e["generation"] == begun)
    return min(len(set(holders) - {3}) for holders in layout["holders"]) - 1


def test_in_a_terminal(job):
    first = json.loads(top(job[0], "--json"))
    text = top(job[0], "--once")
    assert "3 of 4 ranks live" in text
    assert "✕" in text
    assert "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION" in text
    assert f"{survives(job[0])} more worker" in text
    later = json.loads(top(job[0], "--json"))
    assert later["committed"] > first["committed"]
    assert later["verdict"] is None
    assert {one["worker"] for one in later["standing"]["places"] if one["slowness"]} == {0, 1, 2}
    assert later["costs"], "fitted"


def test_in_a_browser(job, tmp_path):
    found = shown(f"http://127.0.0.1:{job[1]}/", tmp_path)
    assert found.count('<td class="dead"') == 1
    assert "<b>3 / 4</b>" in found
    assert '<span class="pill ">trains</span>' in found
    assert "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION" in found
    assert 'class="gone"' not in found


def test_by_a_prometheus(job, tmp_path):
    (port,) = free_ports(1)
    with prometheus(f"127.0.0.1:{job[2]}", port, tmp_path / "prometheus") as server:
        server.wait_for("increase(odyssey_steps_total[10s]) > 0")
        assert server.value('odyssey_ranks{state="dead"}') == 1
        assert server.value("odyssey_losses_survived") == survives(job[0])
        assert 0 < server.value("odyssey_goodput_ratio") <= 1
        assert server.value('odyssey_stalls_total{cause="hang"}') == 1
        assert len(server.query("odyssey_worker_slowness_ratio")) == 3
        (recovering,) = server.query('odyssey_lost_seconds{bucket="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"}')
        assert float(recovering["value"][1]) > 0
