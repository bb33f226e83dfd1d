"""What a job would say of a launch line: read from a launch script, or from one of Megatron-LM's own test cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odyssey_megatron import codec
from odyssey_megatron.config import config_from_argv
from odyssey_megatron.doctor.flags import looked_at
from odyssey_megatron.doctor.launch_script import job_flags
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import read_text
from odyssey_megatron.upstream import refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a job under ``--odyssey``, as far as its flags say."""

    refused: dict[str, str]
    """Flag -> the sentence that the job would end with."""
    ignored: dict[str, str]
    """Flag -> why it changes nothing."""
    unknown: tuple[str, ...]
    """Not among Megatron-LM's flags; they pass if the script adds them."""

    @property
    def starts(self) -> bool:
        return not self.refused

    def told(self, name: str) -> str:
        """For people."""
        if self.refused:
            head = "refused with --odyssey, because"
        elif self.ignored:
            head = f"starts with --odyssey as far as its flags say, with {len(self.ignored)} of them ignored"
        else:
            head = "starts with --odyssey as far as its flags say"
        lines = [f"{name}: {head}", *(f"  {sentence}" for sentence in self.refused.values())]
        lines += [f"  {flag} changes nothing: {why}" for flag, why in self.ignored.items()]
        if self.unknown:
            lines.append(f"  not Megatron-LM's, so of the script's own: {' '.join(self.unknown)}")
        return "\n".join(lines)


def judged(flags: Sequence[str], version: str | None = None) -> Verdict:
    """What a job with ``flags`` would say. Raises ConfigError: of Odyssey's own flags one is wrong."""
    config = config_from_argv(flags)
    args, parser, strange = looked_at(flags, version)
    ignored = dict(refusals.ignored(args, parser))
    return Verdict(
        refused=refusals.reasons(args, parser, config.accepted, strict=config.is_strict),
        ignored={} if config.is_strict else ignored,
        unknown=tuple(
            one for one in strange if not one.startswith("--odyssey") and one[2:] not in config.accepted
        ),
    )


def read_job(named: str) -> list[str]:
    """The flags in the file ``named``; ``FILE:NAME`` is one of several cases in it.

    Raises ConfigError.
    """
    path, _, name = named.rpartition(":")
    if not path or Path(named).exists():
        path, name = named, ""
    try:
        text = read_text(path)
        if not text.lstrip().startswith("{"):
            return job_flags(text)
        found = codec.parsed(text)
        cases = found.get("cases", [found])
        if not isinstance(cases, list):
            raise ValueError('"cases" is no list')
        named_cases = {str(one.get("name", "")): one for one in cases if isinstance(one, dict)}
        if len(cases) > 1 and name not in named_cases:
            raise ValueError(
                f"it has {len(cases)} cases: name one, as {path}:{next(iter(named_cases), 'NAME')}"
            )
        return case_flags(named_cases[name] if name else cases[0])
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"--job {named}: {error}") from None


def case_flags(case: Any) -> list[str]:
    """The launch line of a case: ``{"args": {"--flag": value}}``, where ``true`` is a flag without a value.

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
