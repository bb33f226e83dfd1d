"""What takes more than a few seconds says on stderr how far it is."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

EVERY_S = 5.0


class Progress:
    """Writes a line to stderr every :data:`EVERY_S` seconds while its block runs: what is being done.

    Args:
        command: what the lines begin with.
    """

    def __init__(self, command: str) -> None:
        self._command, self._doing = command, ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="progress", daemon=True)

    def say(self, doing: str) -> None:
        """Note what is being done from now on."""
        self._doing = doing

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _write(self) -> None:
        began_s = time.monotonic()
        while not self._ended.wait(EVERY_S) and sys.stderr is not None:  # None: closed by the parent process
            sys.stderr.write(f"{self._command}: {time.monotonic() - began_s:,.0f} s, {self._doing}\n")
            sys.stderr.flush()
