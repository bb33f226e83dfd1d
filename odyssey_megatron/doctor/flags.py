"""The job's flags as the job would see them: those that are refused, change nothing, or are not Megatron's."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from odyssey_megatron import patch
from odyssey_megatron.config import OdysseyConfig, config_from_argv, flag_of
from odyssey_megatron.doctor.relations import broken
from odyssey_megatron.doctor.rows import OK, PROBLEM, WARNING, CheckRow, Job
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import nearest
from odyssey_megatron.upstream import refusals, smaller
from odyssey_megatron.upstream.refusals import Argument

_SETTINGS = frozenset(flag_of(one) for one in fields(OdysseyConfig))
BARE = frozenset(flag_of(one) for one in fields(OdysseyConfig) if "bare" in one.metadata)
"""Flags of Odyssey's that need no value."""
_CONSTANTS = {"True": True, "False": False}


@functools.cache
def recorded(tag: str) -> dict[str, Argument]:
    """Return each flag of Megatron's own parser in ``tag``."""
    known = {}
    for line in (patch.data() / tag / "arguments.txt").read_text().splitlines():
        flag, rest, *takes = line.split()
        dest, _, const = rest.partition("=")
        known[flag] = Argument(dest, _CONSTANTS.get(const), *takes)
    return known


def known_to(version: str | None) -> dict[str, Argument]:
    """Return the flags of ``version``, or those of all recorded versions together if it is not one of them. These take
    any value, unless all versions agree.
    """
    patches, known = patch.supported(), dict[str, Argument]()
    for tag in [one.tag for one in patches if one.version == version] or [one.tag for one in patches]:
        for flag, found in recorded(tag).items():
            agreed = known.get(flag, found).takes == found.takes
            known[flag] = found if agreed else found._replace(takes="")
    return known


def known_since(flag: str) -> str:
    """Return in words which of the recorded versions know ``flag``; empty: none does."""
    tags = [one.tag for one in patch.supported()]
    knowing = [tag for tag in tags if flag in recorded(tag)]
    if not knowing:
        return ""
    is_known_on = knowing == tags[-len(knowing) :]
    return f"known from {knowing[0]} on" if is_known_on else f"known to {', '.join(knowing)}"


def looked_at(flags: Sequence[str], version: str | None) -> tuple[Any, refusals.MegatronParser, list[str]]:
    """Return ``flags`` as a job of ``version`` would parse them, its parser, and those that are not Megatron's.

    No default is known here: whatever is on the line counts as given.
    """
    known = known_to(version)
    args, strange = refusals.parsed(flags, known)
    names = (one.partition("=")[0] for one in flags)
    spelled = {known[name][0]: [name] for name in names if name in known}
    defaults = dict.fromkeys(vars(args), _NOT_GIVEN)
    return args, refusals.MegatronParser(flags=spelled, defaults=defaults, version=version or ""), strange


def given_in(args: Any, parser: refusals.MegatronParser) -> dict[str, Any]:
    """Return destination -> value of what is on the line; both arguments are :func:`looked_at`'s."""
    return {name: getattr(args, name) for name in parser.flags}


def not_taken(
    flags: Sequence[str], version: str | None, *, is_whole: bool, is_one: bool = True
) -> dict[str, str]:
    """Return flag -> why Megatron-LM would refuse it, for its value or beside others, with or without Odyssey.

    Args:
        is_whole: as in :func:`broken`.
        is_one: whether all flags are of one job, and not of branches of a script that exclude each other.
    """
    found = refusals.misread(flags, known_to(version))
    args, parser, _ = looked_at(flags, version)
    return found | broken(given_in(args, parser), is_whole=is_whole) if is_one else found


def check_taken(flags: Sequence[str], *, is_whole: bool, is_one: bool = True) -> None:
    """Raise ConfigError if :func:`not_taken` finds something, by the flags of all recorded versions."""
    if wrong := not_taken(flags, None, is_whole=is_whole, is_one=is_one):
        raise ConfigError(f"Megatron-LM refuses this launch line: {' '.join(wrong.values())}")


def settings(
    flags: Sequence[str], environ: Mapping[str, str] = MappingProxyType({})
) -> tuple[OdysseyConfig, list[str]]:
    """Odyssey's settings in a launch script's ``flags``, and those whose value only running it would tell. Raises
    ConfigError.

    Args:
        environ: Variables that the script sets, beside those that are set here.
    """
    known, unknown = list[str](), dict[str, str]()
    for before, word in pairwise(["", *flags]):
        flag, is_assigned, _ = word.partition("=$")
        if before in BARE and word.startswith("$"):
            continue  # more flags, and not its value
        if before in _SETTINGS and word.startswith("$") and not _can_be(before, word):
            unknown[known.pop()] = f"{before} {word}"
        elif flag in _SETTINGS and is_assigned and not _can_be(word):
            unknown[flag] = word
        else:
            unknown.pop(word.partition("=")[0], None)  # said again, behind the script's flags
            known.append(word)
    unread = {name: value for name, value in environ.items() if "$" in value}
    said = {name: value for name, value in (os.environ | environ).items() if name not in unread}
    return config_from_argv(known, said), [*unknown.values(), *map("=".join, unread.items())]


def _can_be(*words: str) -> bool:
    try:
        config_from_argv(words)
    except ConfigError:
        return False
    return True


def rows(job: Job, version: str | None) -> Iterator[CheckRow]:
    """Yield a row for each flag that a job would say something about. ``--odyssey observe`` would only say it."""
    args, parser, strange = looked_at(job.flags, version)
    state = WARNING if job.config.mode == "observe" else PROBLEM
    for one in refusals.refused(args, parser):
        yield _row(one.flag, state, f"{one.verdict}: {one.reason}", one.remedy)
    # Some flags may be given here, and not a whole launch line.
    for flag, what in not_taken(job.flags, version, is_whole=False).items():
        yield _row(flag, PROBLEM, what, "Megatron-LM's arguments.py says what the flag means.")
    ignored = {flag for flag, _ in refusals.ignored(args, parser)} if job.config.is_strict else ()
    for flag, why in refusals.moot(args, parser):
        bad, remedy = flag in ignored, "Leave it out, or leave out --odyssey-strict."
        yield _row(
            flag, state if bad else OK, f"changes nothing with --odyssey: {why}", remedy if bad else ""
        )
    for flag, what in refusals.cautions(args):
        yield _row(flag, OK, what)
    yield from _smaller_cells(args, job.config)
    for flag in strange:
        if not flag.startswith("--odyssey"):
            meant = "" if (since := known_since(flag)) else nearest(flag, known_to(version))
            yield _row(
                flag, WARNING,
                f"not among the flags of Megatron-LM {version or ''} that were recorded{since and f' ({since})'}",
                f"{f'Is {meant} meant? ' if meant else ''}Nothing, if the script adds it. If Megatron-LM does, a "
                "job is refused that has not "
                f"--odyssey-accept {flag.removeprefix('--')}.",
            )  # fmt: skip


def _smaller_cells(args: Any, config: OdysseyConfig) -> Iterator[CheckRow]:
    """Yield what becomes of the ranks of a tensor-, context- or expert-parallel group that loses one for good."""
    kept = smaller.of_flags(vars(args))
    if kept.is_single:
        return
    if why := kept.whole or ("--odyssey-shrink off" if config.shrink == "off" else ""):
        found = f"ranks whose cell has lost one {'stand by' if config.respawn else 'leave with it'}: {why}"
    else:
        found = "a cell that has lost ranks goes on with fewer"
        limits = (
            ("with as many tensor-parallel ones", kept.shards),
            ("with a divisor of a whole one's", kept.even),
        )
        found += "".join(f"; {how}, since {reason}" for how, reason in limits if reason)
    yield _row("--odyssey-shrink", OK, found)


_NOT_GIVEN = object()


def _row(name: str, state: str, found: str, remedy: str = "") -> CheckRow:
    return CheckRow(area="flags", name=name, state=state, found=found, remedy=remedy)
