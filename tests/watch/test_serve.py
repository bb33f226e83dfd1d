"""Page and metrics over HTTP: who is answered what. Real sockets, on loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import sys
import threading
import time

import pytest

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch.agent.onlookers import Onlookers, page_token
from odyssey_megatron.metrics.follow import Follower
from odyssey_megatron.metrics.live import live
from odyssey_megatron.watch import serve
from odyssey_megatron.watch.command import metrics_answers, serve_page
from odyssey_megatron.watch.exposition import exposition
from odyssey_megatron.watch.newest import Newest
from odyssey_megatron.watch.serve import Server, listen

TOKEN = "c0ffee"
STRANGERS = (
    ("/", {}),
    ("/part", {}),
    ("/?token=c0ffe", {}),
    ("/?token=%ff", {}),
    ("/", {"Authorization": "Bearer x"}),
    ("/", {"Cookie": "odyssey_page=x"}),
    ("/", {"Cookie": "a=\x7f;;="}),
)


@pytest.fixture(params=["", TOKEN], ids=["loopback", "token"])
def served(runs, request):
    """(token, port) of a page."""
    server = serve_page(Newest(runs["shot_at"]), listen("127.0.0.1", 0, "--page-port"), request.param)
    yield request.param, server.socket.getsockname()[1]
    server.shutdown()
    server.server_close()


def get(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_nobody_waits_for_what_another_has_asked_for(runs, monkeypatch):
    """Of a long journal it takes seconds, in which a scrape would come to nothing."""
    newest = Newest(runs["shot_at"])
    before, begun, goes_on = newest.get(), threading.Event(), threading.Event()
    newest._due_s = 0.0
    look = newest._follower.look
    monkeypatch.setattr(newest._follower, "look", lambda: (begun.set(), goes_on.wait(10), look())[-1])
    other = threading.Thread(target=newest.get)
    other.start()
    assert begun.wait(10)
    assert newest.get() is before
    goes_on.set()
    other.join()
    assert newest.get() is not before


def test_a_page_on_loopback(runs):
    server = serve_page(Newest(runs["shot_at"]), listen("127.0.0.1", 0, "--page-port"), "")
    port = server.socket.getsockname()[1]
    status, headers, body = get(port, "/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert body.count('<td class="dead"') == 3
    assert get(port, "/part")[2] in body, "what is asked for later is what stood there"
    assert not re.search(r'(src|href)="', body)
    assert get(port, "/etc/passwd")[0] == get(port, "/../part")[0] == get(port, "/part/x")[0] == 404
    # A page of another site whose name was made to mean loopback.
    assert get(port, "/", Host="evil.example")[0] == 403
    assert get(port, "/", Host=f"localhost:{port}")[0] == get(port, "/", Host="[::1]:80")[0] == 200
    server.shutdown()
    server.server_close()


def test_elsewhere_it_wants_the_token(runs):
    server = serve_page(Newest(runs["shot_at"]), listen("127.0.0.1", 0, "--page-port"), TOKEN)
    port = server.socket.getsockname()[1]
    for path, headers in STRANGERS:
        status, _, body = get(port, path, **headers)
        assert status == 401
        assert "shot_at" not in body
    status, headers, body = get(port, f"/?token={TOKEN}")
    assert (status, headers["Location"]) == (303, "./")
    assert "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert get(port, "/part", Cookie=cookie, Host="node0.example")[0] == 200
    assert get(port, "/", Authorization=f"Bearer {TOKEN}")[0] == 200
    server.shutdown()
    server.server_close()


def test_rubbish_is_refused_and_nobody_is_kept_waiting(served):
    token, port = served
    for raw in (b"\x00" * 64, b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n__import__",
                b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: [\r\n\r\n"):  # fmt: skip
        with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
            one.sendall(raw)
            one.shutdown(socket.SHUT_WR)
            answer = one.recv(4096)
        assert not re.match(rb"HTTP/1.\d 2", answer), raw
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    assert get(port, "/", Authorization=f"Bearer {token}")[0] == 200
    for one in silent:
        one.close()


def test_who_asks_a_byte_at_a_time_keeps_nobody_out_for_long(served, monkeypatch):
    token, port = served
    monkeypatch.setattr(serve._Handler, "timeout", 1.0)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(serve._AT_ONCE)]
    ends_s = time.monotonic() + 1.5
    while time.monotonic() < ends_s:
        for one in slow:
            with contextlib.suppress(OSError):  # it was closed
                one.sendall(b"G")
        time.sleep(0.2)
    assert get(port, "/", Authorization=f"Bearer {token}")[0] == 200
    for one in slow:
        one.close()


def test_a_crowd_takes_no_more_threads_than_there_may_be_connections(served):
    token, port = served
    crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(serve._AT_ONCE)]
    with pytest.raises(ConnectionError):  # the next one is closed unanswered
        get(port, "/", Authorization=f"Bearer {token}")
    for one in crowd:
        one.close()


def test_text_of_the_job_is_never_a_tag(runs, tmp_path):
    for path in (runs["shot_at"] / "journal").iterdir():
        (tmp_path / "journal").mkdir(exist_ok=True)
        # Injected deaths say nothing of a node.
        lines = [one for one in path.read_text().splitlines(keepends=True) if '"injected"' not in one]
        text = (
            "".join(lines).replace("killed", "<script>document.title=1</script>").replace("host0", "<b>'\\\"")
        )
        (tmp_path / "journal" / path.name).write_text(text)
    server = serve_page(Newest(tmp_path), listen("127.0.0.1", 0, "--page-port"), "")
    body = get(server.socket.getsockname()[1], "/")[2]
    assert body.count("<script>") == 1, "the page's own"
    assert "&lt;script&gt;document.title=1" in body
    assert "<b>'" not in body
    assert "--exclude" not in body, "what no host is called is nothing to paste into a command"
    server.shutdown()
    server.server_close()


def test_connections_for_which_no_thread_can_be_started_take_no_place(monkeypatch):
    answers = {"/": lambda: ("text/plain", b"here")}
    server = Server(listen("127.0.0.1", 0, "--page-port"), answers, token="").start()
    port = server.socket.getsockname()[1]

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        for _ in range(serve._AT_ONCE + 1):
            with pytest.raises(OSError):
                get(port, "/")
    assert get(port, "/")[::2] == (200, "here")
    server.shutdown()
    server.server_close()


def test_metrics(runs):
    server = Server(
        listen("127.0.0.1", 0, "--metrics-port"), metrics_answers(Newest(runs["shot_at"])), token=""
    ).start()
    status, headers, body = get(server.socket.getsockname()[1], "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in body.splitlines() if not line.startswith("#"))
    assert "odyssey_elapsed_seconds Since the launch, to the newest line of the journal" in body
    assert float(values["odyssey_job_over"]) == 1
    assert "odyssey_job_over 1 once the job has ended: told by odyssey top --metrics-port alone" in body
    for name in ("productive_seconds", "lost_seconds", "lost_tokens"):
        assert re.search(f"# HELP odyssey_{name} .*; also falls, .*: no rate", body)
    assert float(values["odyssey_steps_total"]) == 20
    assert float(values['odyssey_lost_seconds{bucket="UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"}']) == pytest.approx(
        1.25, 0.01
    )
    assert float(values['odyssey_ranks{state="dead"}']) == 3
    assert float(values["odyssey_gpus_given_up"]) == 0
    assert float(values["odyssey_saves_failed_total"]) == 0
    assert float(values['odyssey_layer_losses_survived{layer="layer 4"}']) == 1
    assert float(values['odyssey_worker_slowness_ratio{node="host1",replica="0",stage="3",worker="6"}']) == 1
    assert float(values['odyssey_node_suspect{node="host0"}']) == 0, "its ranks' deaths were injected"
    server.shutdown()
    server.server_close()


def test_the_board_asks_only_for_metrics_that_there_are(runs, checkout):
    text = exposition(live("x", Follower(runs["shot_at"]).events())).decode()
    there = set(re.findall(r"^(odyssey_\w+)", text, re.MULTILINE))
    board = json.loads((checkout / "examples" / "grafana" / "odyssey.json").read_text())
    panels = [one for one in board["panels"] if one["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= 10
    asked = {name for query in queries for name in re.findall(r"\bodyssey_\w+", query)}
    variables = [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    asked |= {name for query in variables for name in re.findall(r"\bodyssey_\w+", str(query))}
    assert asked <= there, asked - there
    shown = {name.removesuffix("_total") for name in asked}
    assert {"odyssey_worker_slowness_ratio", "odyssey_lost_tokens", "odyssey_layer_losses_survived"} <= shown


def test_without_the_library_one_paragraph_says_what_to_install(runs, monkeypatch):
    monkeypatch.delitem(sys.modules, "odyssey_megatron.watch.exposition", raising=False)
    for name in [one for one in sys.modules if one.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"pip install 'odyssey-megatron\[metrics\]'"):
        metrics_answers(Newest(runs["shot_at"]))
    with pytest.raises(ConfigError, match=r"pip install 'odyssey-megatron\[metrics\]'"):
        Onlookers(OdysseyConfig(metrics_port=1), "")


class Missing:
    """As if prometheus_client were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "prometheus_client":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_port_that_is_taken_is_said_before_anything_is_trained(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--odyssey-page-port {port}: cannot listen at 127.0.0.1"):
            Onlookers(OdysseyConfig(page_port=port), "")


def test_the_token_is_made_from_the_secret_and_does_not_tell_it():
    assert page_token("secret") == page_token("secret") != page_token("other")
    assert "secret" not in page_token("secret")
