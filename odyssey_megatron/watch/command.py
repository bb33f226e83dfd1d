"""``odyssey top``: follow a job, running or ended, in this terminal; or as a page and as metrics for Prometheus."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from odyssey_megatron.codec import to_jsonable
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import Between, Parser
from odyssey_megatron.metrics.live import Live
from odyssey_megatron.metrics.outlet import say
from odyssey_megatron.metrics.run import finite
from odyssey_megatron.watch import page
from odyssey_megatron.watch.newest import Newest
from odyssey_megatron.watch.screen import frame
from odyssey_megatron.watch.serve import Answer, Server, is_loopback, listen

TOKEN = "ODYSSEY_PAGE_TOKEN"
_PORT = Between(0, 65_535, whole=True)
_CLEAR, _HOME, _REST_OF_LINE, _REST = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_HTML = "text/html; charset=utf-8"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand and return its exit code. Raises ConfigError."""
    parser = Parser(prog="odyssey top", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the job's --odyssey-run-dir")
    parser.add_argument("--once", action="store_true", help="print one frame, and end")
    parser.add_argument("--json", action="store_true", help="print the state as JSON, and end")
    parser.add_argument(
        "--every-s", type=Between(0.1, 3600), default=1.0, help="seconds between two frames (1)"
    )
    parser.add_argument(
        "--page-port", type=_PORT, help="serve the page there, and no frames; 0: any free port"
    )
    parser.add_argument("--metrics-port", type=_PORT, help="serve metrics for Prometheus there, at /metrics")
    parser.add_argument(
        "--bind",
        default="127.0.0.1",
        help=f"address to serve at (127.0.0.1); others want a token, which is drawn unless {TOKEN} is set",
    )
    # Sockets that listen already.
    for name in ("--page-fd", "--metrics-fd"):
        parser.add_argument(name, type=Between(-1, 1 << 20, whole=True), default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    newest = Newest(args.run_dir)
    if args.page_port is not None or args.metrics_port is not None:
        return _serve(newest, args)
    if args.json:
        print(json.dumps(finite(to_jsonable(newest.get())), allow_nan=False))
        return 0
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if args.once or not sys.stdout.isatty():
        width = shutil.get_terminal_size((120, 50)).columns
        print(frame(newest.get(), now_s=time.time(), width=width, colours=colours))
        return 0
    return _follow(newest, args.every_s, colours=colours)


def _follow(newest: Newest, every_s: float, *, colours: bool) -> int:
    """Show frames until the job has ended, or somebody presses Ctrl-C."""
    sys.stdout.write(_HIDE + _CLEAR)
    try:
        while True:
            state, size = newest.get(), shutil.get_terminal_size()
            text = frame(state, now_s=time.time(), width=size.columns, colours=colours)
            if state.is_over:  # all of it, as it stays on the screen
                sys.stdout.write(_HOME + _CLEAR + text + "\n")
                return 0
            lines = text.splitlines()[: size.lines - 1]
            sys.stdout.write(_HOME + "".join(line + _REST_OF_LINE + "\n" for line in lines) + _REST)
            sys.stdout.flush()
            time.sleep(every_s)
    finally:
        sys.stdout.write(_SHOW)
        sys.stdout.flush()


def _serve(newest: Newest, args: Any) -> int:
    """Serve until a signal; for a job's agent, which has started this, until stdin ends, as the agent is gone then."""
    token = "" if is_loopback(args.bind) else os.environ.get(TOKEN) or secrets.token_hex(16)
    if args.page_port is not None:
        server = serve_page(newest, _listening(args.page_fd, args.bind, args.page_port, "--page-port"), token)
        say(f"[odyssey] the page of this job: {address(server.socket, token)}")
    if args.metrics_port is not None:
        listening = _listening(args.metrics_fd, args.bind, args.metrics_port, "--metrics-port")
        server = Server(listening, metrics_answers(newest), token=token).start()
        wants = f", with the bearer token {token}" if token else ""
        say(f"[odyssey] metrics for Prometheus: {address(server.socket, '')}metrics{wants}")
    if args.page_fd >= 0 or args.metrics_fd >= 0:
        sys.stdin.buffer.read()
    else:
        threading.Event().wait()
    return 0


def _listening(fd: int, host: str, port: int, flag: str) -> socket.socket:
    return socket.socket(fileno=fd) if fd >= 0 else listen(host, port, flag)


def serve_page(newest: Newest, listening: socket.socket, token: str) -> Server:
    """Serve the page at ``/``, and at ``/part`` its part that changes, which it asks for every second."""
    answers: Mapping[str, Answer] = {
        "/": lambda: (_HTML, page.document(newest.get()).encode(errors="replace")),
        "/part": lambda: (_HTML, page.part(newest.get()).encode(errors="replace")),
    }
    return Server(listening, answers, token=token, policy=page.POLICY).start()


def metrics_answers(newest: Newest) -> Mapping[str, Answer]:
    """Return what is served at each path. Raises ConfigError without prometheus_client."""
    exposition = prometheus_text()
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return {"/metrics": lambda: (kind, exposition(newest.get()))}


def prometheus_text() -> Callable[[Live], bytes]:
    """Return ``exposition.exposition``. Raises ConfigError without prometheus_client."""
    try:
        from odyssey_megatron.watch.exposition import exposition
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("prometheus_client"):
            raise
        raise ConfigError(
            "metrics for Prometheus need prometheus_client: pip install 'odyssey-megatron[metrics]', or pip install "
            "prometheus-client."
        ) from None
    return exposition


def address(listening: socket.socket, token: str) -> str:
    """Return the address to type into a browser."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
