"""The launch line in a shell script, found without running the script."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from odyssey_megatron.doctor.launcher import slurm_variables
from odyssey_megatron.doctor.shell import ASSIGNMENT, Script
from odyssey_megatron.errors import ConfigError

_SBATCH = re.compile(r"^#SBATCH\s+(.*)", re.MULTILINE)
_SCRIPT = re.compile(r"\S+\.py")


class LaunchCommand(NamedTuple):
    """The words of a command that starts a job."""

    script: str
    """The path of the script; empty if it is not known."""
    flags: list[str]
    launcher: Sequence[str] = ()
    """What stands before the script: what Slurm is told, in the file's comments and by srun, and then torchrun."""
    choices: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Variable of the script -> its values: the one that counts, and those that branches give it that may be taken as
    well.
    """
    environ: Mapping[str, str] = MappingProxyType({})
    """Variables of Odyssey's that the script sets. Whether it exports them is not looked at."""
    folder: str = ""
    """Of the file that the command was read from."""


def launch_line(
    text: str,
    variables: Mapping[str, Sequence[str]] = MappingProxyType({}),
    sourced: Callable[[str], str | None] = lambda path: None,
) -> LaunchCommand:
    """Return the Python script that a shell script runs, with its arguments; of several, the one with most flags.

    Args:
        text: The shell script.
        variables: Its environment, as far as it is known; ``@`` has the script's arguments.
        sourced: The text of a file that it sources, by its path; None: it is not known.

    Raises:
        ConfigError: It is not a shell script, or runs no Python script.
    """
    told = [word for line in _SBATCH.findall(text) for word in line.split("#")[0].split()]
    script = Script(slurm_variables(told) | {name: list(value) for name, value in variables.items()}, sourced)
    try:
        found = list(_launches(text, script, told))
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


def _launches(text: str, script: Script, before: list[str], depth: int = 0) -> Iterator[LaunchCommand]:
    """Yield each Python script that is run with flags, or with variables that may hold some. Raises ValueError."""
    for command in script.commands(text):
        words = list(script.expanded(command))
        for position, word in enumerate(words):
            if _SCRIPT.fullmatch(word):
                # A word of an array may be a flag together with its value.
                arguments = [
                    part
                    for one in words[position + 1 :]
                    for part in (one.split() if one[:2] == "--" else [one])
                ]
                if any(one.startswith(("--", "$")) for one in arguments):
                    launcher = [*before, *words[:position]]
                    environ = {
                        name: " ".join(value)
                        for name, value in script.variables.items()
                        if value and (name == "ODYSSEY" or name.startswith("ODYSSEY_"))
                    }
                    yield LaunchCommand(word, arguments, launcher, script.choices(command), environ)
                break
            # A command in quotes, as for sh -c. What a variable is set to is read where that is used.
            if ".py" in word and len(word.split()) > 1 and depth < 3 and not ASSIGNMENT.fullmatch(word):
                yield from _within(word, script, [*before, *words[:position]], depth + 1)


def _within(text: str, script: Script, before: list[str], depth: int) -> Iterator[LaunchCommand]:
    """As :func:`_launches`, of a text in quotes or a here-document, which need not be a script at all."""
    with contextlib.suppress(ValueError):
        yield from _launches(text, script, before, depth)
