"""What a job would say of a launch line, read from a launch script or from one of Megatron-LM's test cases."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from odyssey_megatron import codec
from odyssey_megatron.config import BEHIND_SCRIPT
from odyssey_megatron.doctor.flags import (
    BARE,
    given_in,
    known_since,
    known_to,
    looked_at,
    not_taken,
    settings,
)
from odyssey_megatron.doctor.launch_script import LaunchCommand, launch_line
from odyssey_megatron.doctor.launcher import nodes_and_gpus
from odyssey_megatron.doctor.relations import broken_on
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import nearest, read_text
from odyssey_megatron.upstream import refusals
from odyssey_megatron.upstream.refusals import Argument
from odyssey_megatron.upstream.refused import TRIED
from odyssey_megatron.upstream.source import has_megatron

STARTED_WITH = "--job 'NAME=VALUE train.sh ARGUMENT ...'"
"""How it is said what a script is started with."""
SAY_THEM = f"What the script is started with decides that: {STARTED_WITH}"
NAME_IT = "Name the checkout that the job runs: odyssey doctor PATH --job FILE"
_SHOWN = 60
"""Letters of a value at most."""
_SEVERAL = re.compile(r"\[([^]]+)\]|(\d[\d ]*)")
"""Several values of one flag, as cases have them."""
_SETS = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


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
    """Flags that ``version`` does not have. They pass if the script adds them."""
    version: str = ""
    """The megatron-core that the flags were judged by; empty: all recorded ones together."""
    runs_it: bool = False
    """Whether the job is known to run ``version``, as its script is in that checkout."""
    unread: tuple[str, ...] = ()
    """Words that may hold more flags: what they stand for is known only when the script runs."""
    undecided: tuple[str, ...] = ()
    """Flags that may be refused or not: what their values are is known only when the script runs."""
    choices: tuple[str, ...] = ()
    """Sentences on variables of which only running the script would tell which of several values they have."""
    script: str = ""
    """The name of the script, if it is not one that has been tried."""
    of_gpus: str = ""
    """Why flags do not go with the GPUs that the script starts, as it is read here. It may be started with others."""
    without_odyssey: bool = False
    """Whether the line of a launch script does not have ``--odyssey``, so that it would start a plain job."""

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
        lines = [f"{name}, by {self._judged_by}: {head}"]
        lines += [f"  {sentence}" for sentence in self.refused.values()]
        if self.without_odyssey:
            lines.append("  its launch line has no --odyssey yet: append it, or the job survives no loss")
        lines += [f"  {flag} changes nothing: {why}" for flag, why in self.ignored.items()]
        if self.starts:
            lines += [f"  {flag}: {what}" for flag, what in self.cautions.items()]
        if self.of_gpus:
            lines.append(f"  {self.of_gpus}")
        lines += self._unknown_told()
        if self.unread:
            lines.append(
                f"  not looked at, as only running it would tell what they stand for: {' '.join(self.unread)}. If "
                "there are flags in them, add these to this command"
            )
        if self.undecided:
            lines.append(
                f"  not decided, as only running it would tell: {', '.join(self.undecided)}. Give these to this "
                f"command, too, with their values, or say what the script is started with: {STARTED_WITH}"
            )
        lines += [f"  {sentence}" for sentence in self.choices]
        if self.choices:
            lines.append(f"  {SAY_THEM}")
        if self.script and not self.refused:
            lines.append(
                f"  {self.script} is none of {', '.join(TRIED)}: what it builds is looked at when the job starts, and "
                "must be one of their models"
            )
        return "\n".join(lines)

    @property
    def _judged_by(self) -> str:
        if not self.version:
            return "all versions whose flags were recorded"
        return f"{'' if self.runs_it else 'the installed '}megatron-core {self.version}"

    def _unknown_told(self) -> Iterator[str]:
        of_nobody = [flag for flag in self.unknown if not known_since(flag)]
        if of_nobody:
            yield f"  not Megatron-LM's, so of the script's own: {' '.join(map(_asked, of_nobody))}"
        others = [f"{flag} ({since})" for flag in self.unknown if (since := known_since(flag))]
        if others:
            remedy = "" if self.runs_it else f". {NAME_IT}"
            yield f"  not megatron-core {self.version}'s: {' '.join(others)}{remedy}"


def judged(
    flags: Sequence[str],
    version: str | None = None,
    line: LaunchCommand | None = None,
    *,
    checkout: Path | None = None,
) -> LineVerdict:
    """Return what a job with ``flags`` would say.

    Args:
        version: the megatron-core by whose flags is judged; None: by those of all recorded ones.
        line: the rest of the launch line that ``flags`` are part of.
        checkout: the folder of ``version``, if the job is known to run it.

    Raises:
        ConfigError: one of Odyssey's own flags, or one of its variables, is wrong.
    """
    line = line or LaunchCommand("", [])
    config, unknown = settings(flags, line.environ)
    args, parser, strange = looked_at(flags, version)
    ignored = dict(refusals.ignored(args, parser))
    distributed = bool(getattr(args, "use_distributed_optimizer", False))
    name = os.path.basename(line.script)
    other = refusals.script_refused(line.script)
    unread_words = tuple(_unread(flags, known_to(version)))
    before = next((word for word in line.launcher if word.startswith("--odyssey")), "")
    strange = [one for one in strange if not one.startswith("--odyssey") and one[2:] not in config.accepted]
    # One of Megatron-LM's own scripts adds no flags, so that its parser ends the job.
    missing = {one: known_since(one) for one in strange if known_since(one)} if name in TRIED else {}
    there = _named_in(checkout, missing) if checkout else missing
    missing = {flag: since for flag, since in missing.items() if flag not in there}
    return LineVerdict(
        refused=({name: other} if other else {})
        | ({before: f"{before} stands before {line.script}: {BEHIND_SCRIPT}"} if before else {})
        | not_taken(flags, version, is_whole=not unread_words, is_one=not line.choices)
        | {
            flag: f"{flag}: megatron-core {version} does not have it ({since})."
            for flag, since in missing.items()
        }
        | refusals.reasons(args, parser, config.accepted, strict=config.is_strict),
        ignored=({} if config.is_strict else ignored) | dict(config.without_effect(distributed=distributed)),
        cautions=dict(refusals.cautions(args)),
        unknown=tuple(one for one in strange if one not in missing),
        version=version or "",
        runs_it=checkout is not None,
        unread=unread_words,
        undecided=(*refusals.undecided(args), *unknown),
        choices=tuple(choices_told(line.choices)),
        of_gpus=_of_gpus(given_in(args, parser), line, is_whole=not unread_words),
        without_odyssey=bool(name) and config.mode == "off" and not (before or unread_words),
        script="" if name in TRIED else name,
    )


def _of_gpus(given: Mapping[str, Any], line: LaunchCommand, *, is_whole: bool) -> str:
    """Return why flags do not go with the number of GPUs that ``line`` starts; empty: they do, or it is not known."""
    size = nodes_and_gpus(line.launcher)
    if size is None or line.choices:
        return ""
    why = broken_on(given, size[0] * size[1], is_whole=is_whole)
    # Templates have one node, which whoever starts them changes.
    told = f"as it is read here the script starts {size[0]} node(s) of {size[1]} GPUs, which Megatron-LM would refuse"
    return f"{told}: {why}" if why else ""


def _named_in(checkout: Path, flags: Iterable[str]) -> set[str]:
    """Return those of ``flags`` that Megatron's files in ``checkout`` name: a fork may have taken them from another
    version.

    From core_v0.18 on Megatron makes flags of its configurations' fields, so that the destination's name counts, too.
    """
    known = known_to(None)
    waiting = {one: re.compile(rf"""["']{re.escape(one)}["']|\b{known[one].dest}\b""") for one in flags}
    found = set[str]()
    for file in (checkout / "megatron").rglob("*.py") if waiting else ():
        with contextlib.suppress(OSError):
            text = file.read_text(errors="replace")
            found |= {flag for flag, name in waiting.items() if name.search(text)}
    return found


def _asked(flag: str) -> str:
    """A misspelled flag, or one of another version, ends a job when Megatron reads its arguments, which may be hours
    after it was queued.
    """
    meant = nearest(flag, known_to(None))
    return f"{flag} (is {meant} meant?)" if meant else flag


def unread(flags: Sequence[str]) -> list[str]:
    """Return the words that may hold more flags, but stand for what is known only when the script runs."""
    return list(_unread(flags, known_to(None)))


def choices_told(choices: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for each variable of a script of which it is not known which of several values it has."""
    return [
        f"${name} is {counts or 'empty'} as it is read here, and {' or '.join(others)} in other branches of the "
        "script, which only running it would choose"
        for name, (counts, *others) in (
            (name, [one[:_SHOWN] for one in values]) for name, values in choices.items()
        )
    ]


def _unread(flags: Sequence[str], known: Mapping[str, Argument]) -> Iterator[str]:
    """Yield variables and commands that are not the value of a flag."""
    for before, word in pairwise(["", *flags]):
        takes_one = before not in BARE and known.get(before, Argument("")).const is None
        is_value = before.startswith("--") and "=" not in before and takes_one
        if word.startswith("$") and not is_value:
            yield word


def read_job(named: str) -> LaunchCommand:
    """Return the launch line in the file ``named``. A YAML file is a test case of Megatron-LM's, a JSON file has
    cases, of which ``FILE:NAME`` is one. Of a script ``named`` may be all that is typed to start it, as in ``NODES=4
    train.sh 7b``.

    Raises ConfigError.
    """
    variables, script = _typed(named)
    path, _, name = script.rpartition(":")
    if not path or os.path.exists(script):
        path, name = script, ""
    try:
        text = read_text(path)
        if path.endswith((".yaml", ".yml")):
            return LaunchCommand("", _flags_in_yaml(text), folder=str(Path(path).parent))
        if not text.lstrip().startswith("{"):
            if name:
                raise ValueError(f"{path} is a script, which has no cases. What it takes: {STARTED_WITH}")
            folder = Path(path).parent
            line = launch_line(text, variables, lambda file: _sourced(file, folder))
            return line._replace(folder=str(folder))
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


def checkout_of(line: LaunchCommand) -> Path | None:
    """Return the Megatron-LM checkout that has the script of ``line``, as seen from the working directory, or else from
    the folder of the file that the line was read from. Without a script it is the one that this file is in.
    """
    if line.folder and not line.script:
        return next((one for one in Path(line.folder).resolve().parents if has_megatron(str(one))), None)
    for folder in ("", line.folder):
        script = os.path.join(folder, line.script)
        if os.path.isfile(script) and has_megatron(os.path.dirname(script)):
            return Path(script).parent
    return None


def _typed(named: str) -> tuple[dict[str, list[str]], str]:
    """Return the variables and arguments that ``named`` gives a script, and the path of the script."""
    try:
        words = [] if os.path.exists(named) else shlex.split(named)
    except ValueError:
        words = []
    at = next((at for at, word in enumerate(words) if not _SETS.fullmatch(word)), None)
    if at is None or len(words) == 1:
        return {}, named
    variables = {name: [value] for name, _, value in (word.partition("=") for word in words[:at])}
    arguments = words[at + 1 :]
    return variables | ({"@": arguments} if arguments else {}), words[at]


def _sourced(named: str, folder: Path) -> str | None:
    """Return the text of a file that a script in ``folder`` sources. What only running it would tell is taken to be
    that folder.
    """
    first, _, rest = named.partition("/")
    behind = folder / rest if first.startswith("$") else folder / named
    for path in (Path(named), behind):
        with contextlib.suppress(ValueError):
            return read_text(str(path))
    return None


def _flags_in_yaml(text: str) -> list[str]:
    """Return the launch line in a ``model_config.yaml`` of Megatron-LM's functional tests. Raises ValueError."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError("it is a YAML file, which PyYAML reads: pip install pyyaml") from None
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"it is no YAML file ({' '.join(str(error).split())})") from None
    args = found.get("MODEL_ARGS") if isinstance(found, dict) else None
    if not isinstance(args, dict):
        raise ValueError("it is no test case of Megatron-LM's, which has its flags in a block MODEL_ARGS")
    return case_flags({"args": args})


def case_flags(case: Any) -> list[str]:
    """Return the launch line of a case: ``{"args": {"--flag": value}}``, where ``true`` is a flag without a value.

    Raises ValueError.
    """
    args = case.get("args") if isinstance(case, dict) else None
    if not isinstance(args, dict):
        raise ValueError('a case is {"name": ..., "args": {"--flag": value}}')
    for flag, value in args.items():
        if not str(flag).startswith("--") or isinstance(value, (dict, list)):
            raise ValueError(
                f"a case has --flag: value, where values are numbers, texts or true; found {str(flag)[:_SHOWN]}"
            )
    words = []
    for flag, value in args.items():
        if value not in (None, False):
            words += [flag, *([] if value is True else _words_of(str(value)))]
    return words


def _words_of(text: str) -> list[str]:
    several = _SEVERAL.fullmatch(text)
    return (several[1] or several[2]).split() if several else [text]
