"""What a job would say of a launch line, read from a launch script or from one of Megatron-LM's test cases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from odyssey_megatron import codec
from odyssey_megatron.doctor.flags import BARE, known_to, looked_at, settings
from odyssey_megatron.doctor.launch_script import UNKNOWN, LaunchCommand, launch_line
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import read_text
from odyssey_megatron.upstream import refusals
from odyssey_megatron.upstream.refused import TRIED


@dataclass(frozen=True, slots=True, kw_only=True)
class LineVerdict:
    """What becomes of a job under ``--odyssey``, as far as its flags say."""

    refused: dict[str, str]
    """Flag, or script -> the sentence that the job would end with."""
    ignored: dict[str, str]
    """Flag -> why it changes nothing."""
    cautions: dict[str, str]
    """Flag -> what a loss may change with it."""
    unknown: tuple[str, ...]
    """Flags that are not Megatron-LM's. They pass if the script adds them."""
    unread: tuple[str, ...] = ()
    """Words that may hold more flags: what they stand for is known only when the script runs."""
    undecided: tuple[str, ...] = ()
    """Flags that may be refused or not: what their values are is known only when the script runs."""
    script: str = ""
    """The name of the script, if it is not one that has been tried."""

    @property
    def starts(self) -> bool:
        return not self.refused

    def told(self, name: str) -> str:
        """Return the verdict in words, for people."""
        if self.refused:
            head = "refused with --odyssey, because"
        elif self.ignored:
            head = f"starts with --odyssey as far as its flags say, with {len(self.ignored)} of them ignored"
        else:
            head = "starts with --odyssey as far as its flags say"
        lines = [f"{name}: {head}", *(f"  {sentence}" for sentence in self.refused.values())]
        lines += [f"  {flag} changes nothing: {why}" for flag, why in self.ignored.items()]
        if self.starts:
            lines += [f"  {flag}: {what}" for flag, what in self.cautions.items()]
        if self.unknown:
            lines.append(f"  not Megatron-LM's, so of the script's own: {' '.join(self.unknown)}")
        if self.unread:
            lines.append(
                f"  not looked at, as only running it would tell what they stand for: {' '.join(self.unread)}. If "
                "there are flags in them, add these to this command"
            )
        if self.undecided:
            lines.append(
                f"  not decided, as only running it would tell: {', '.join(self.undecided)}. Give these to this "
                "command, too, with their values"
            )
        if self.script and not self.refused:
            lines.append(
                f"  {self.script} is none of {', '.join(TRIED)}: what it builds is looked at when the job starts, and "
                "must be one of their models"
            )
        return "\n".join(lines)


def judged(flags: Sequence[str], version: str | None = None, script: str = "") -> LineVerdict:
    """Return what a job of ``script`` with ``flags`` would say.

    Raises ConfigError if one of Odyssey's own flags is wrong.
    """
    config, unknown = settings(flags)
    args, parser, strange = looked_at(flags, version)
    ignored = dict(refusals.ignored(args, parser))
    distributed = bool(getattr(args, "use_distributed_optimizer", False))
    name = os.path.basename(script)
    other = refusals.script_refused(script)
    return LineVerdict(
        refused=({name: other} if other else {})
        | refusals.reasons(args, parser, config.accepted, strict=config.is_strict),
        ignored=({} if config.is_strict else ignored) | dict(config.without_effect(distributed=distributed)),
        cautions=dict(refusals.cautions(args)),
        unknown=tuple(
            one for one in strange if not one.startswith("--odyssey") and one[2:] not in config.accepted
        ),
        unread=tuple(_unread(flags, known_to(version))),
        undecided=(*refusals.undecided(args), *unknown),
        script="" if name in TRIED else name,
    )


def _unread(flags: Sequence[str], known: Mapping[str, tuple[str, Any]]) -> Iterator[str]:
    """Yield variables and commands that are not the value of a flag."""
    for before, word in pairwise(["", *flags]):
        takes_one = before not in BARE and known.get(before, ("", None))[1] is None
        is_value = before.startswith("--") and "=" not in before and takes_one
        if word.startswith("$") and not is_value:
            yield "$(...)" if word == UNKNOWN else word


def read_job(named: str) -> LaunchCommand:
    """Return the launch line in the file ``named``. ``FILE:NAME`` is one of several cases in the file.

    Raises ConfigError.
    """
    path, _, name = named.rpartition(":")
    if not path or Path(named).exists():
        path, name = named, ""
    try:
        text = read_text(path)
        if not text.lstrip().startswith("{"):
            return launch_line(text)
        found = codec.parsed(text)
        cases = found.get("cases", [found])
        if not isinstance(cases, list):
            raise ValueError('"cases" is no list')
        named_cases = {str(one.get("name", "")): one for one in cases if isinstance(one, dict)}
        if len(cases) > 1 and name not in named_cases:
            raise ValueError(
                f"it has {len(cases)} cases: name one, as {path}:{next(iter(named_cases), 'NAME')}"
            )
        return LaunchCommand("", case_flags(named_cases[name] if name else cases[0]))
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"--job {named}: {str(error).removesuffix('.')}.") from None


def case_flags(case: Any) -> list[str]:
    """Return the launch line of a case: ``{"args": {"--flag": value}}``, where ``true`` is a flag without a value.

    Raises ValueError.
    """
    args = case.get("args") if isinstance(case, dict) else None
    if not isinstance(args, dict) or any(isinstance(value, (dict, list)) for value in args.values()):
        raise ValueError(
            'a case is {"name": ..., "args": {"--flag": value}}, its values are numbers, texts or true'
        )
    words = []
    for flag, value in args.items():
        if value not in (None, False):
            words += [flag] if value is True else [flag, str(value)]
    return words
