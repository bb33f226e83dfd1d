"""Keeps a rank from ending because what it prints cannot be written: its log may be on a full disk.

Python raises from ``print`` then, in the middle of a training loop, and on one rank after the other. A pipe that nobody
reads is another matter: see ``tap.py``.
"""

from __future__ import annotations

import contextlib
import io
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
            spared = io.TextIOWrapper(
                io.BufferedWriter(_Spared(descriptor)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            _replaced.append(stream)
            setattr(sys, name, spared)


class _Spared(io.FileIO):
    """A descriptor, to which writing does not fail."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "wb", closefd=False)
        self._lost, self._why = 0, ""
        """Number of lines that were lost, and the reason for the last of them."""

    def write(self, data: Any) -> int | None:  # type: ignore[override] # None, as of FileIO: it would block
        try:
            if self._lost:
                missing = f"{self._lost} line(s) are missing here, as they could not be written ({self._why})"
                super().write(f"[odyssey] {missing}.\n".encode())
                self._lost = 0
            return super().write(data)
        except OSError as error:
            self._lost, self._why = self._lost + bytes(data).count(b"\n"), error.strerror or repr(error)
            return len(data)
