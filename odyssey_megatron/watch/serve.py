"""An HTTP server that answers GET for a few paths: the page, and the metrics. Nothing in a request is evaluated.

Without a token it should listen on loopback only, and it answers only requests that name a loopback host. So
no page of another site that a browser shows can read it (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from odyssey_megatron.errors import ConfigError, OdysseyError

COOKIE = "odyssey_page"
_PATIENCE_S = 10.0
"""Seconds within which a request must have come, however slowly it is sent, and its answer must be read."""
_AT_ONCE = 32
"""Number of connections at once; more are closed unanswered."""

Answer = Callable[[], tuple[str, bytes]]
"""Gives the content type and the bytes of what is at a path."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int, flag: str) -> socket.socket:
    """Return a listening socket; port 0 is any free port. Raises ConfigError, which names ``flag``."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(found[0], found[1], found[2])
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(found[4])
        listening.listen(_AT_ONCE)
    except OSError as error:
        raise ConfigError(
            f"{flag} {port}: cannot listen at {host} port {port} ({error.strerror or error}). Give another port, or an "
            "address of this machine."
        ) from None
    return listening


class Server(ThreadingHTTPServer):
    """Serves ``answers``, by their paths, at the socket ``listening`` from threads of its own."""

    daemon_threads = True

    def __init__(
        self, listening: socket.socket, answers: Mapping[str, Answer], *, token: str, policy: str = ""
    ):
        """Create a server.

        Args:
            token: The secret that every client must know; "": none, as only loopback is served.
            policy: The header Content-Security-Policy; "": nothing may be loaded.
        """
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.answers, self.token, self.policy = listening, answers, token, policy
        self._room = threading.BoundedSemaphore(_AT_ONCE)

    def start(self) -> Server:
        threading.Thread(target=self.serve_forever, name="odyssey-page", daemon=True).start()
        return self

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except Exception:  # no thread can be started: this connection is closed, and its place is free
                self._room.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client that hangs up, or is no browser, is of no concern."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S
    server: Server
    server_version, sys_version = "odyssey", ""

    def setup(self) -> None:
        super().setup()
        # The socket's own timeout starts again with each byte.
        self._limit = threading.Timer(self.timeout, self._hear_no_more)
        self._limit.daemon = True
        self._limit.start()

    def _hear_no_more(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            self.connection.shutdown(socket.SHUT_RD)

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def do_GET(self) -> None:
        self._limit.cancel()
        try:
            asked = urlsplit(self.path)
        except ValueError:
            return self._say(HTTPStatus.BAD_REQUEST)
        if not self.server.token and not is_loopback(self._host()):
            return self._say(HTTPStatus.FORBIDDEN, "This page is asked for as localhost.\n")
        if self.server.token and not self._is_known():
            given = parse_qs(asked.query).get("token", [""])[0]
            if not self._matches(given):
                return self._say(HTTPStatus.UNAUTHORIZED, "The job's log has the address with its token.\n")
            # The token goes into a cookie, so that it stays in no history and is sent to no other site.
            cookie = f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            return self._say(HTTPStatus.SEE_OTHER, headers={"Set-Cookie": cookie, "Location": "./"})
        answer = self.server.answers.get(asked.path)
        if answer is None:
            return self._say(HTTPStatus.NOT_FOUND)
        try:
            kind, body = answer()
        except OdysseyError as error:
            return self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n")
        self._answer(HTTPStatus.OK, kind, body)

    def _host(self) -> str:
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return ""

    def _is_known(self) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer" and self._matches(given.strip()):
            return True
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and self._matches(cookie.value)

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode())

    def _say(self, status: HTTPStatus, text: str = "", headers: Mapping[str, str] | None = None) -> None:
        self._answer(status, "text/plain; charset=utf-8", (text or f"{status.phrase}\n").encode(), headers)

    def _answer(
        self, status: HTTPStatus, kind: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        fixed = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Content-Security-Policy": self.server.policy or "default-src 'none'",
        }
        for name, value in (fixed | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the job's log is about the job."""
