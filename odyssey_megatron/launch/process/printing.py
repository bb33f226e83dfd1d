"""Keeps a rank from ending because what it prints cannot be written: its log may be on a full disk.

Python raises from ``print`` then, in the middle of a training loop, and on one rank after the other. A pipe that nobody
reads is another matter: see ``tap.py``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

_replaced: list[Any] = []  # what is collected closes its descriptor


def spare() -> None:
    """From now on, lose and count the lines that standard output or error of this process cannot take."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):
            if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != descriptor:
                continue  # the script has put something else there
            with contextlib.suppress(OSError):
                stream.flush()
            # By ``python -u`` a rank that is killed has written what it has printed. It writes ``print(1, 2)`` in four
            # pieces, though, between which others may write: lines are written as they end.
            is_raw = isinstance(stream.buffer, io.RawIOBase)
            spared = io.TextIOWrapper(
                _Spared(descriptor) if is_raw else io.BufferedWriter(_Spared(descriptor)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=is_raw or stream.line_buffering,
            )
            _replaced.append(stream)
            setattr(sys, name, spared)


class _Spared(io.FileIO):
    """A descriptor, to which writing does not fail."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "wb", closefd=False)
        self._lost, self._within_line, self._why = 0, False, ""
        """Number of lines that were lost, whether a further one was begun, and the reason for the last of them."""

    def write(self, data: Any) -> int:
        text = rest = bytes(data)
        missing = self._lost + self._within_line
        note = f"[odyssey] {missing} line(s) are missing here, as they could not be written ({self._why}).\n"
        if missing and not self._put(note.encode()):
            self._lost, self._within_line, missing = 0, False, 0
        if not missing:
            rest = self._put(rest)
        if rest:
            self._lost += rest.count(b"\n")
            self._within_line = not rest.endswith(b"\n")
        return len(text)

    def _put(self, text: bytes) -> bytes:
        """Return what could not be written of ``text``. A write may take a part, and the stream would not go on."""
        while text:
            try:
                written = super().write(text)
            except OSError as error:
                self._why = error.strerror or repr(error)
                break
            if written is None:  # a full pipe that does not block
                self._why = os.strerror(errno.EAGAIN)
                break
            text = text[written:]
        return text
