"""Checks of numbers, files and command lines from outside, made where these enter and alike for all commands.

A range is written once, beside the setting or field that it limits. argparse takes it as a ``type``, the codec
finds it in ``Annotated``, and both refuse a value outside of it with the same words.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from odyssey_megatron.errors import ConfigError


def nearest(flag: str, known: Iterable[str]) -> str:
    """Return the flag of ``known`` that ``flag`` may be a misspelling of; empty: none is alike."""
    return next(iter(difflib.get_close_matches(flag, list(known), n=1, cutoff=0.85)), "")


@dataclass(frozen=True, slots=True)
class Between:
    """The range of numbers from ``low`` to ``high``, both included; it never contains NaN."""

    low: float
    high: float
    whole: bool = False

    def check(self, value: Any) -> Any:
        """Return ``value``. Raises ValueError if it is outside the range."""
        if not self.low <= value <= self.high:
            raise ValueError(f"{self} is expected, found {_short(value)}")
        return value

    def read(self, text: str) -> Any:
        """Return the number in ``text``. Raises ValueError if it is no number, or outside the range."""
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            raise ValueError(f"{self} is expected, found {_short(text)!r}") from None
        return self.check(value)

    def __call__(self, text: str) -> Any:
        """Read ``text`` as argparse's ``type`` does, with its exception."""
        try:
            return self.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        low, high = (f"{one:,}" if self.whole else f"{one:,.12g}" for one in (self.low, self.high))
        if math.isinf(self.high) or self.high >= _ANY:
            return kind if self.low <= -_ANY else f"{kind} of {low} or more"
        return f"{kind} from {low} to {high}"


_ANY = 2**63 - 1
WHOLE = Between(-_ANY, _ANY, whole=True)
COUNT = Between(0, _ANY, whole=True)
FINITE = Between(-1.7e308, 1.7e308)


def _short(value: Any) -> str:
    try:
        text = str(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number without end"
    return text if len(text) <= 40 else text[:40] + "…"


def printable(text: str) -> str:
    """Return ``text`` in one line that cannot control a terminal: it may quote a file or a command line."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError, as all other checks do, instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. '{self.prog} --help' lists what there is.")


def output_file(text: str) -> Path:
    """Return the path of a file that is to be written, as an argument's ``type``: whether that can be is better said
    before minutes of work than after. Raises argparse.ArgumentTypeError.
    """
    path = Path(text)
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror or error}") from None
    return path


MAX_FILE_BYTES = 64 * 2**20
"""The largest profile or trace that is read; those that runs write have some kilobytes."""


def read_text(path: str | Path) -> str:
    """Return the contents of a text file that a user has named, without a byte order mark.

    Raises:
        ValueError: the file is missing, unreadable, too long or not UTF-8, or it is no regular file (a pipe without a
            writer would block for ever).
    """
    raw = read_bytes(path, MAX_FILE_BYTES)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8 (byte {error.start} of {len(raw)})") from None


def read_bytes(path: str | Path, most: int) -> bytes:
    """Return the bytes of a file of at most ``most`` bytes. Raises ValueError as :func:`read_text`."""
    try:
        # Non-blocking: opening a pipe would otherwise wait until somebody writes to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is no file, but a folder, a pipe or a device")
            if found.st_size > most:
                raise ValueError(f"it has {found.st_size:,} bytes, and at most {most:,} are read")
            return file.read(most)
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror or error})") from None
