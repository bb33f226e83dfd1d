"""The launch line in a shell script, found without running the script.

It understands as much of the shell as launch scripts use: variables, arrays, quotes, comments and continued
lines. All branches of an ``if`` are read, so that what is said of a job holds for all jobs that its script
may start.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from odyssey_megatron.errors import ConfigError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
_SBATCH = re.compile(r"^#SBATCH\s+(.*)", re.MULTILINE)
_COMMENT = re.compile(r"(?:(?<=\s)|^)#.*", re.MULTILINE)
_SEPARATORS = frozenset(";&|<>()\n")
UNKNOWN = "$UNKNOWN"
"""Stands for what a command would print."""
_SCRIPT = re.compile(r"\S+\.py")
_MOST_WORDS = 100_000
"""Limit for a line in which variables are replaced: one may stand for others many times over."""

Variables = dict[str, list[str]]


class LaunchCommand(NamedTuple):
    """The words of a command that starts a job."""

    script: str
    """The path of the script; empty if it is not known."""
    flags: list[str]
    launcher: Sequence[str] = ()
    """What stands before the script: what Slurm is told, in the file's comments and by srun, and then torchrun."""


def launch_line(text: str) -> LaunchCommand:
    """Return the Python script that a shell script runs, with its arguments; of several, the one with most flags.

    Args:
        text: The shell script.

    Raises:
        ConfigError: It is not a shell script, or runs no Python script.
    """
    try:
        found = list(_launches(text, {}, _told_slurm(text)))
    except ValueError as error:
        raise ConfigError(
            f"this is no shell script that can be read without running it ({error}). Give the flags themselves, in "
            "its place."
        ) from None
    if not found:
        raise ConfigError(
            "no command in it runs a Python script (a word that ends in .py) with flags. Give the flags themselves, in "
            "its place."
        )
    return max(found, key=lambda line: _number_of_flags(line.flags))


def _number_of_flags(arguments: Sequence[str]) -> int:
    return sum(one.startswith("--") for one in arguments)


def _told_slurm(text: str) -> list[str]:
    return [word for line in _SBATCH.findall(text) for word in line.split("#")[0].split()]


def _launches(text: str, variables: Variables, before: list[str], depth: int = 0) -> Iterator[LaunchCommand]:
    """Yield each Python script that is run with flags."""
    for command in _commands(text, variables):
        words = list(_expanded(command, variables))
        for position, word in enumerate(words):
            if _SCRIPT.fullmatch(word):
                # A word of an array may be a flag together with its value.
                arguments = [
                    part
                    for one in words[position + 1 :]
                    for part in (one.split() if one[:2] == "--" else [one])
                ]
                if _number_of_flags(arguments):
                    yield LaunchCommand(word, arguments, [*before, *words[:position]])
                break
            if ".py" in word and len(word.split()) > 1 and depth < 3:  # a command in quotes, as for sh -c
                yield from _launches(word, variables, [*before, *words[:position]], depth + 1)


def _commands(text: str, variables: Variables) -> Iterator[list[str]]:
    """Yield the commands as lists of words, with variables not yet replaced. Assignments are put into
    ``variables``.
    """
    command: list[str] = []
    array: str | None = None
    # The words of the array, among which may be those that it had before.
    words: list[str] = []
    before: Variables = {}
    for word in _words(text):
        assigned = _ASSIGNMENT.fullmatch(word)
        if array is not None:
            if word == ")":
                variables[array], array = words, None
            elif word not in _SEPARATORS:
                words += _expanded([word], variables)
        elif assigned and all(_ASSIGNMENT.fullmatch(one) or one in ("export", "local") for one in command):
            name, more, value = assigned.groups()
            before[name] = variables.get(name, [])
            variables[name] = (before[name] if more else []) + (
                [_replaced(value, variables)] if value else []
            )
            command.append(word)
        elif word == "(" and command and command[-1].endswith("=") and _ASSIGNMENT.fullmatch(command[-1]):
            array = command.pop().rstrip("+=")
            words, variables[array] = variables.get(array, []), before.pop(array, [])
        elif word in _SEPARATORS:
            yield command
            command = []
        else:
            command.append(word)
    yield command


def _words(text: str) -> Iterator[str]:
    text = _without_commands(_COMMENT.sub("", text.replace("\\\r\n", " ").replace("\\\n", " ")))
    found = shlex.shlex(text, posix=True, punctuation_chars="".join(_SEPARATORS))
    found.whitespace, found.whitespace_split, found.commenters = " \t\r", True, ""
    for word in found:
        if set(word) <= _SEPARATORS:
            yield from word
        else:
            yield word


def _without_commands(text: str) -> str:
    """Replace ``$(...)`` and backquotes by ``UNKNOWN``, as what they would print is not known."""
    kept, depth, start = [], 0, 0
    for found in re.finditer(r"\$\(|[()]", text):
        if depth:
            depth += -1 if found[0] == ")" else 1
            if not depth:
                start = found.end()
        elif found[0] == "$(":
            kept += [text[start : found.start()], UNKNOWN]
            depth = 1
    return re.sub(r"`[^`]*`", UNKNOWN, "".join(kept) + ("" if depth else text[start:]))


def _expanded(words: Sequence[str], variables: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield ``words`` with variables replaced. A variable that is a whole word gives all words of its value."""
    for count, word in enumerate(words):
        alone = _VARIABLE.fullmatch(word)
        values = variables.get(alone[1] or alone[2]) if alone else None
        if values is None:
            parts = [_replaced(word, variables)]
        else:
            # Quotes are not seen here. A variable that holds a list of flags is taken to be unquoted.
            parts = values[0].split() if len(values) == 1 and "--" in values[0] else values
        if count + len(parts) > _MOST_WORDS:
            raise ValueError(f"a line has more than {_MOST_WORDS:,} words")
        yield from parts


def _replaced(word: str, variables: Mapping[str, list[str]]) -> str:
    def value(found: re.Match[str]) -> str:
        known = variables.get(found[1] or found[2])
        return " ".join(known) if known is not None else found[3] if found[3] is not None else found[0]

    replaced = _VARIABLE.sub(value, word)
    if len(replaced) > 10 * _MOST_WORDS:
        raise ValueError("a variable's value is too long")
    return replaced
