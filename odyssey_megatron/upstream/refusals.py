"""Finds the flags of Megatron-LM's that cannot work under failure, and says what to do instead. Needs neither torch nor
megatron.

Flags are identified by their destination in the parsed arguments, whatever a version calls them. They are checked
twice: as the user gave them, since Megatron's validation resets some of them, and as validation has left them, since it
derives others. A flag whose value decides has a predicate; any other is refused if it is set.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.upstream.flags import AS_ODYSSEY_DOES, MOOT, WORKS
from odyssey_megatron.upstream.refused import ONLY_IN, ROWS, SAID, SCRIPTS, TRIED, Decides, with_muon


class Argument(NamedTuple):
    """A flag of Megatron's parser, as it was recorded (``patches/<tag>/arguments.txt``)."""

    dest: str
    const: Any = None
    """What it sets if it takes no value; None: it takes one."""
    takes: str = ""
    """Which values it takes: ``int``, ``float``, or ``a|b|c``; empty: any."""

    def why_not(self, value: str) -> str:
        """Return what is expected in place of ``value``; empty if the parser takes it."""
        if not self.takes:
            return ""
        if self.takes not in _NUMBERS:
            choices = self.takes.split("|")
            return "" if value in choices else f"one of {', '.join(choices)} is expected"
        kind, what = _NUMBERS[self.takes]
        try:
            kind(value)
        except ValueError:
            return f"{what} is expected"
        return ""


_NUMBERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronParser:
    """Megatron's own arguments, without those of the user's script; an empty one if they are not known yet."""

    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Destination -> the ways it is spelled."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""

    @classmethod
    def of(cls, parser: argparse.ArgumentParser, version: str) -> MegatronParser:
        """The arguments that ``parser`` knows so far."""
        actions = [one for one in parser._actions if one.default != argparse.SUPPRESS]
        flags: dict[str, list[str]] = {}
        for one in actions:
            flags.setdefault(one.dest, []).extend(one.option_strings)
        return cls(flags=flags, defaults={one.dest: one.default for one in actions}, version=version)

    def given(self, args: Any) -> Iterator[str]:
        """The destinations whose value is not the default."""
        for name, default in self.defaults.items():
            if getattr(args, name, default) != default:
                yield name

    def flag(self, name: str) -> str:
        """The flag of destination ``name``."""
        return next(iter(self.flags.get(name, ())), "--" + name.replace("_", "-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An argument that would go wrong under failure, or silently fail to do what its user relies on."""

    dest: str
    flag: str
    """The flag's usual name."""
    why: str
    since: str
    """The first version with which it could work; empty: it is refused for good."""
    remedy: str
    refuses: Decides | None
    """Whether this value, with these arguments, cannot work. None: any but the default is refused."""
    only: str
    """How the versions begin in which it is refused; empty: in all."""

    def holds_in(self, version: str) -> bool:
        """Whether the flag is refused in ``version``; an empty one is not known."""
        return not version or version.startswith(self.only)

    def given(self, args: Any, parser: MegatronParser) -> bool:
        """Whether ``args`` have the refused value, set by hand or by Megatron's validation."""
        if not self.holds_in(parser.version):
            return False
        value = getattr(args, self.dest, None)
        if self.refuses is not None:
            return not _is_variable(value) and self.refuses(value, args)
        return bool(value) and value != parser.defaults.get(self.dest)

    def named(self, parser: MegatronParser) -> str:
        """The flag, or its default if it is refused without having been given."""
        return self.flag if self.dest in parser.flags else f"the default of {self.flag}"

    @property
    def verdict(self) -> str:
        """What is said after the flag's name."""
        return "does not work with --odyssey yet" if self.since else "is refused with --odyssey"

    @property
    def reason(self) -> str:
        """Why the flag is refused, and from which version on it could work."""
        return f"{self.why} It could work from {self.since} on." if self.since else self.why


_WHOLE_MOMENTUM = "with Muon each holder of a layer keeps all of its optimizer state"
REFUSALS = tuple(
    Refusal(
        dest=dest,
        flag=SAID.get(dest, "--" + dest.replace("_", "-")),
        why=why,
        since=since,
        remedy=remedy,
        refuses=refuses,
        only=ONLY_IN.get(dest, ""),
    )
    for dest, why, since, remedy, refuses in ROWS
)
"""All refusals; the table in docs/flags.md is made from them."""
REFUSED = frozenset(one.dest for one in REFUSALS)


def refused(args: Any, parser: MegatronParser) -> Iterator[Refusal]:
    """The refusals that apply to ``args``, before Megatron's validation or after it."""
    return (one for one in REFUSALS if one.given(args, parser))


def undecided(args: Any) -> Iterator[str]:
    """The flags of a launch script's ``args`` that may be refused or not, by what only running it would tell."""
    for dest, flag in {one.dest: one.flag for one in REFUSALS if one.refuses is not None}.items():
        value = getattr(args, dest, None)
        if _is_variable(value):
            yield f"{flag} {' '.join(map(str, _words(value)))}"


def _is_variable(value: Any) -> bool:
    """Of a launch script, or a list with some."""
    return any(isinstance(one, str) and "$" in one for one in _words(value))


def _words(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def unknown(args: Any, parser: MegatronParser, accepted: Collection[str] = ()) -> Iterator[str]:
    """The flags in ``args``, as the user gave them, that are Megatron's but on none of the lists."""
    for dest in parser.given(args):
        if dest not in WORKS and dest not in MOOT and dest not in REFUSED:
            flag = parser.flag(dest)
            if flag.removeprefix("--") not in accepted:
                yield flag


def moot(args: Any, parser: MegatronParser) -> Iterator[tuple[str, str]]:
    """The flags in ``args``, as the user gave them, that change nothing, each with the reason."""
    for dest in parser.given(args):
        if dest in MOOT and getattr(args, dest) not in AS_ODYSSEY_DOES.get(dest, ()):
            yield parser.flag(dest), MOOT[dest]


def ignored(args: Any, parser: MegatronParser) -> Iterator[tuple[str, str]]:
    """As :func:`moot`, without flags that plain Megatron-LM would not read either, some of which it sets itself."""
    yield from ((flag, why) for flag, why in moot(args, parser) if not why.startswith("read "))
    if with_muon(args):
        if args.optimizer == "dist_muon":
            yield "--optimizer dist_muon", _WHOLE_MOMENTUM
        elif getattr(args, "use_distributed_optimizer", False):
            yield "--use-distributed-optimizer", _WHOLE_MOMENTUM


def cautions(args: Any) -> Iterator[tuple[str, str]]:
    """The flags in ``args`` that work with a caveat, each with the caveat and a remedy: a loss may leave a trace in
    what the job computes, or the flag does only a part of its work.
    """
    if getattr(args, "timing_log_level", None) == 2:
        yield (
            "--timing-log-level 2",
            "forward-compute, backward-compute and batch-generator are timed. Of level 1 nothing is: "
            f"{MOOT['timing_log_level']}.",
        )
    if getattr(args, "fp16", False) and not getattr(args, "accumulate_allreduce_grads_in_fp32", False):
        yield (
            "--fp16",
            "gradients are added up in 16 bits, and which microbatches a worker adds up decides whether its sum "
            "overflows: after a loss a step may overflow that would not have without it, or go on that would have. A "
            "step that overflows is skipped on all ranks, and the scale halved. "
            "With --accumulate-allreduce-grads-in-fp32 the same steps are skipped as without a loss.",
        )


def reasons(
    args: Any, parser: MegatronParser, accepted: Collection[str] | None = None, *, strict: bool = False
) -> dict[str, str]:
    """Flag -> what is said of each flag that cannot work: its name first, the remedy last.

    Args:
        accepted: the unknown flags that the user vouches for; None: Megatron has derived values of its own by now, so
            unknown flags are not reported.
        strict: report each flag that would be ignored, too.
    """
    lines = {}
    for one in refused(args, parser):
        value = getattr(args, one.dest, None)
        shown = one.flag if value in (None, True, False) or " " in one.flag else f"{one.flag} {value}"
        lines[one.flag] = f"{shown} {one.verdict}: {one.reason} {one.remedy}"
    if accepted is not None:
        lines |= {
            flag: f"{flag} is not known to Odyssey, though megatron-core {parser.version} has it: it may go wrong "
            f"under failure. Leave it out, or vouch for it with --odyssey-accept {flag.removeprefix('--')}."
            for flag in unknown(args, parser, accepted)
        }
    if strict:
        lines |= {
            flag: f"{flag} changes nothing with --odyssey: {why}. Leave it out, or leave out --odyssey-strict."
            for flag, why in ignored(args, parser)
        }
    return lines


def check(
    args: Any, parser: MegatronParser, accepted: Collection[str] | None = None, *, strict: bool = False
) -> None:
    """Raise ConfigError that names all flags that cannot work, before any GPU time is spent. Arguments as for
    :func:`reasons`.
    """
    lines = list(reasons(args, parser, accepted, strict=strict).values())
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError(f"{len(lines)} of the job's flags cannot be used:\n" + "\n".join(lines))


def script_refused(path: str) -> str | None:
    """What is said of a script that trains something unsupported; None: it may work."""
    name = os.path.basename(path)
    if name not in SCRIPTS:
        return None
    return (
        f"{name} does not work with --odyssey: it trains {SCRIPTS[name]}, while jobs are planned as one row of layers "
        f"between an embedding and a head. {', '.join(TRIED)} work, and scripts that build the same models."
    )


def _of_one_flag(words: Sequence[str]) -> Iterator[str]:
    """The values at the start of ``words`` that belong to one flag. After the first value a launch script's variable
    may be flags.
    """
    for at, one in enumerate(words):
        if one.startswith("--") or (at > 0 and one.startswith("$")):
            return
        yield one


def _given(flags: Sequence[str], at: int) -> list[str]:
    """The values of the flag at position ``at``."""
    _, equals, given = flags[at].partition("=")
    return list(_of_one_flag([given] * bool(equals) + list(flags[at + 1 :])))


def misread(flags: Sequence[str], known: Mapping[str, Argument]) -> dict[str, str]:
    """Flag -> what Megatron's own parser would end the job with, as it does not take the value."""
    found = {}
    for at, flag in enumerate(flags):
        name = flag.partition("=")[0]
        if not (argument := known.get(name)) or not argument.takes:
            continue
        value = next(iter(_given(flags, at)), "")
        if not value.startswith("$") and (why := argument.why_not(value)):
            found[name] = f"{f'{name} {value}'.strip()}: {why} by Megatron-LM's own parser."
    return found


def _value(words: Sequence[str]) -> Any:
    """The value that Megatron's parser would make of ``words``: None, a single value, or a list."""
    values = [int(one) if one.isdigit() else one for one in words]
    return values if len(values) > 1 else values[0] if values else None


def parsed(flags: Sequence[str], known: Mapping[str, Argument]) -> tuple[SimpleNamespace, list[str]]:
    """A launch line, parsed as far as refusals look at it, and its flags that are not Megatron's."""
    values: dict[str, Any] = {}
    strange = []
    for at, flag in enumerate(flags):
        name = flag.partition("=")[0]
        if not name.startswith("--"):
            continue
        if name not in known:
            strange.append(name)
            continue
        dest, const, _ = known[name]
        values[dest] = _value(_given(flags, at)) if const is None else const
    usual: dict[str, Any] = {"tensor_model_parallel_size": 1}
    return SimpleNamespace(**usual | values), strange
