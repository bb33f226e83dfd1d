"""A wire tap between the ranks of a job and its store: it records what they send, and can send it once more."""

from __future__ import annotations

import contextlib
import socket
import threading


class Recorder:
    """Listens on loopback, and passes everything on to ``target``, both ways."""

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self.sent: list[bytearray] = []
        """What came from each connection, whole."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far, record = socket.create_connection(self._target), bytearray()
                self.sent.append(record)
                for source, sink, kept in ((near, far, record), (far, near, None)):
                    threading.Thread(target=_pass_on, args=(source, sink, kept), daemon=True).start()

    def play_back(self) -> None:
        """Each connection once more, as it was recorded; answers are thrown away."""
        for record in list(self.sent):
            with contextlib.suppress(OSError), socket.create_connection(self._target, timeout=1.0) as again:
                again.settimeout(0.1)
                again.sendall(bytes(record))
                with contextlib.suppress(TimeoutError):
                    while again.recv(1 << 16):
                        pass

    def close(self) -> None:
        self._listener.close()


def _pass_on(source: socket.socket, sink: socket.socket, record: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if record is not None:
                record += data
            sink.sendall(data)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
