"""A file of lines in which a part of a line is worse than none."""

from __future__ import annotations

import contextlib
import os


class Lines:
    """A file that whole lines are appended to, even if the file, its folder or its disk fails between two of them."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = os.fspath(path)
        self._fd = -1
        self._begun: tuple[bytes, bytes] | None = None
        """A line that is written in part, and its rest."""

    def write(self, line: bytes) -> None:
        """Append ``line``. Raises OSError; a part may then be written, and the next call must be with the
        same line.
        """
        try:
            if self._fd >= 0 and not os.fstat(self._fd).st_nlink:
                self.close()  # the file was deleted
            rest = self._begun[1] if self._begun else line
            if self._fd < 0:
                rest = self._open(line, rest)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
                self._begun = (line, rest) if rest else None
        except OSError:
            self.close()
            raise

    def _open(self, line: bytes, rest: bytes) -> bytes:
        """Open the file and return what is left to write.

        A file that ends within a line ends within this one, or within that of a process that was killed.
        """
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        if torn:
            return rest if rest != line else b"\n" + line
        return line

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
