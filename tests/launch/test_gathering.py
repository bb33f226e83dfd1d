"""Agents wait for each other, and say for whom."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from odyssey_megatron.errors import EXIT_BAD_INPUT, ConfigError, ControlPlaneLost
from odyssey_megatron.launch.agent import gathering
from odyssey_megatron.launch.agent.gathering import gather
from odyssey_megatron.launch.wire.admission import ask
from tests.launch.jobserver import CHECKOUT, Job, free_port, wait_for


@pytest.fixture
def store(rendezvous):
    return rendezvous.next_rendezvous().store


class Agent(threading.Thread):
    def __init__(self, store, node: int, nodes: int, limit_s: float = 20.0):
        super().__init__(daemon=True)
        self._of, self._limit_s, self.error = (store, node, nodes), limit_s, None
        self.start()

    def run(self) -> None:
        try:
            gather(*self._of, b"", limit_s=self._limit_s)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def ended(self) -> Exception | None:
        self.join(20.0)
        assert not self.is_alive()
        return self.error


def test_all_come(store):
    assert [one.ended() for one in [Agent(store, node, 5) for node in range(5)]] == [None] * 5
    gather(store, 3, 5, b"", limit_s=0.0)  # in the place of one that was lost


@pytest.mark.parametrize(
    ("come", "missing"),
    [((0, 1, 3), "node 2 is"), ((1, 3), "nodes 0, 2 are"), ((0,), "nodes 1, 2, 3 are")],
)
def test_who_has_not_come_is_named_by_all_others(store, monkeypatch, capfd, come, missing):
    monkeypatch.setattr(gathering, "_SAYS_S", 0.3)
    for one in [Agent(store, node, 4, limit_s=2.0) for node in come]:
        error = one.ended()
        assert isinstance(error, ConfigError)
        assert f"not all of 4 nodes have come within 2 s: {missing} missing" in str(error)
    said = [line for line in capfd.readouterr().err.splitlines() if "Nothing starts before" in line]
    own = "Each has a --node-rank of its own."
    assert said[-1] == f"[odyssey] {missing} still missing, of 4 nodes. Nothing starts before. {own}"
    assert len(said) < 10, "one of them says so"


def test_a_first_node_that_has_ended_since_is_missing(store):
    """Where the job is hosted elsewhere: it had given up waiting before the last one came."""
    store.set(gathering._came(0), b"")
    for one in [Agent(store, node, 3, limit_s=1.0) for node in (1, 2)]:
        assert "not all of 3 nodes have come within 1 s: node 0 is missing" in str(one.ended())


def test_of_hundreds_the_first_are_named():
    assert gathering._named(list(range(200))).endswith("14, 15 and 184 more are")


def test_the_store_s_host_goes(connect):
    class Gone:
        def set(self, key: str, value: str) -> None:
            from torch.distributed import DistNetworkError

            raise DistNetworkError("Connection reset by peer\na stack")

    with pytest.raises(ControlPlaneLost, match="the store is gone: Connection reset by peer$"):
        gather(Gone(), 1, 2, b"")


def start(server, tmp_path, node: int, port: int, nodes: int, log: int | None = None) -> Job:
    return server.run(
        [
            *("--nnodes", nodes, "--node-rank", node, "--nproc-per-node", 1),
            *("--master-addr", "127.0.0.1", "--master-port", port),
            *(
                CHECKOUT / "tests/launch/toy.py",
                "--odyssey-device",
                "cpu",
                "--odyssey-run-dir",
                tmp_path / "run",
            ),
            *("--odyssey-store-timeout-s", 3),
        ],
        log=tmp_path / f"log{node if log is None else log}",
        env={"ODYSSEY_TOKEN": "its nodes"},
    )


@pytest.fixture
def port():
    return free_port()


def test_ctrl_c_while_a_node_is_missing(server, tmp_path, port):
    job = start(server, tmp_path, 0, port, nodes=2)

    def listens() -> bool:
        with socket.socket() as knock:
            return knock.connect_ex(("127.0.0.1", port)) == 0

    wait_for(listens, 30, "the door is open")
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(20) == 128 + signal.SIGINT, job.log()
    assert "Traceback" not in job.log()


def test_a_node_that_ends_while_another_is_missing(server, tmp_path, port):
    first, second = start(server, tmp_path, 0, port, nodes=3), start(server, tmp_path, 1, port, nodes=3)
    ends_s = time.monotonic() + 20
    while True:  # until the store can be asked who has come
        with contextlib.suppress(OSError):
            inside = ask("127.0.0.1", port, "its nodes")["port"]
            break
        assert time.monotonic() < ends_s
    store = TCPStore("127.0.0.1", inside, None, False, timedelta(seconds=10), wait_for_workers=False)
    wait_for(lambda: store.check([gathering._came(1)]), 20, "it has come")
    second.kill()
    third = start(server, tmp_path, 2, port, nodes=3)
    assert [first.wait(60), third.wait(60)] == [1, 1], first.log()
    assert "the agent(s) of node(s) [1] came, and have not started their ranks within 3 s" in first.log()
    assert "Traceback" not in first.log()


def test_two_that_come_as_the_same_node_at_once(server, tmp_path, port):
    """Both would start its ranks: a rank would be two processes."""
    jobs = [start(server, tmp_path, node, port, nodes=2, log=at) for at, node in enumerate((0, 1, 1))]
    assert sorted(job.wait(60) for job in jobs) == [0, 0, EXIT_BAD_INPUT], [job.log() for job in jobs]
    told = jobs[1].log() + jobs[2].log()
    assert told.count("Each node of a job has a --node-rank of its own") == 1
