"""Faults that ``--odyssey-inject`` asks for."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import COUNT, WHOLE, Between

STEP_POINTS = (
    "forward",
    "backward",
    "weight_grad",
    "reduce",
    "agreement",
    "optimizer",
    "commit",
    "param_gather",
)
"""Points of a step at which a fault can be injected."""
RECOVERY_POINTS = ("abort", "groups", "agree", "transfer")
"""Points of a recovery, named as its phases in ``recover.py``."""
INJECTION_POINTS = (*STEP_POINTS, *RECOVERY_POINTS, "evaluate", "checkpoint", "exchange")
"""All of them. At ``exchange`` workers exchange messages before a measured step to time their links."""
_BEHIND_STEPS = (*RECOVERY_POINTS, "evaluate", "checkpoint")
"""Points that come behind the last step, too: they have the number of the step that would be next."""
SIGNALS = ("KILL", "STOP")
STUCK = "STUCK"
"""Given in place of a signal: the training thread waits for ever, and the process's other threads run on."""
FULL = "FULL"
"""Given in place of a signal: the training thread finds no more memory on its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A signal that is sent to ``rank`` when it reaches point ``at`` of ``step``; or what it comes to there besides."""

    rank: int
    step: int
    """-1: any step."""
    at: str
    signal: str = "KILL"
    microbatch: int = -1
    """-1: whichever comes first."""
    generation: int = -1
    """-1: any; 2 means only in the second generation, e.g. while the interrupted step is finished."""
    incarnation: int = 0
    """The process of this rank that is meant: 0 is the first one, 1 the one that replaces it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """The layers of ``rank`` take ``slow`` times as long from ``step`` on."""

    rank: int
    step: int
    slow: float
    until: int = -1
    """The first step that is at full speed again; -1: none."""
    incarnation: int = 0
    """As in :class:`Injection`."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """Messages from one rank to another take ``slow`` times as long from ``step`` on."""

    link: str
    """``3>5``: from rank 3 to rank 5."""
    step: int
    slow: float
    until: int = -1
    """The first step that is at full speed again; -1: none."""

    @property
    def ranks(self) -> tuple[int, int]:
        """The sender and the receiver."""
        return _ends(self.link)


def slows(one: Slowdown | SlowLink, step: int) -> bool:
    """Return whether ``one`` slows down ``step``."""
    return one.step <= step and not 0 <= one.until <= step


def _ends(link: str) -> tuple[int, int]:
    """Return the sender and the receiver that ``link`` names. Raises ValueError."""
    ends = [one.strip() for one in link.split(">")]
    if len(ends) != 2 or not all(map(str.isdecimal, ends)) or int(ends[0]) == int(ends[1]):
        raise ValueError(f"two ranks as in '3>5' are expected, found {link!r}")
    return int(ends[0]), int(ends[1])


class _Link:
    """Reads a link, as ``Between`` reads a number."""

    @staticmethod
    def read(text: str) -> str:
        _ends(text)
        return text


Fault = Injection | Slowdown | SlowLink
SLOWER = Between(1.0, 1000.0)


def parse_injections(text: str) -> tuple[Fault, ...]:
    """Parse the value of ``--odyssey-inject``. Raises ConfigError."""
    return tuple(_parse_injection(one) for one in texts_of(text))


def texts_of(text: str) -> tuple[str, ...]:
    """Return each fault in the value of ``--odyssey-inject``, as it was written."""
    return tuple(one.strip() for one in text.split(";") if one.strip())


def check_can_strike(text: str, *, train_steps: int, cuts_state: bool, times_links: bool) -> None:
    """Check that a job comes to each fault in the value of ``--odyssey-inject``. Raises ConfigError.

    Args:
        train_steps: the number of steps at whose end the job is done.
        cuts_state: whether optimizer state is cut, so that weights are sent behind each step.
        times_links: whether links are timed.
    """
    for said, one in zip(texts_of(text), parse_injections(text), strict=True):
        at = one.at if isinstance(one, Injection) else ""
        last = train_steps if at in _BEHIND_STEPS else train_steps - 1
        never = ""
        if one.step > last:
            never = (
                f"the job has {train_steps} step(s), which count from 0, so that it comes to this in step {last} at "
                "the latest. Name an earlier step, or train for longer"
            )
        elif at == "exchange" and not times_links:
            never = "links are not timed in this job. Add --odyssey-time-links on, or leave the fault out"
        elif at == "param_gather" and not cuts_state:
            never = (
                "only holders of cut optimizer state send each other weights. Add --use-distributed-optimizer (in a "
                "script of your own, TrainingJob.optimizer_copies), or name another point"
            )
        if never:
            raise ConfigError(f"--odyssey-inject {said!r} would never strike: {never}.")


_EXAMPLES: dict[type[Fault], str] = {
    Injection: "rank=5,step=7,at=backward",
    Slowdown: "rank=5,step=20,slow=2.0,until=60",
    SlowLink: "link=3>5,step=20,slow=4,until=60",
}


def _parse_injection(text: str) -> Fault:
    given = {item.partition("=")[0].strip() for item in text.split(",")}
    kind = SlowLink if "link" in given else Slowdown if "slow" in given else Injection
    known = {f.name for f in fields(kind)}
    values: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in known or key in values:
            raise ConfigError(
                f"--odyssey-inject {text!r}: cannot read {item!r}. Write {_EXAMPLES[kind]!r}; the keys are "
                + ", ".join(sorted(known))
                + "."
            )
        try:
            values[key] = _READ[key].read(value) if key in _READ else value
        except ValueError as error:
            raise ConfigError(f"--odyssey-inject {text!r}: {key}: {error}.") from None
    missing = {f.name for f in fields(kind) if f.default is MISSING} - set(values)
    if missing:
        raise ConfigError(f"--odyssey-inject {text!r}: {', '.join(sorted(missing))} is missing.")
    for key, allowed in (("at", INJECTION_POINTS), ("signal", (*SIGNALS, STUCK, FULL))):
        if values.get(key, allowed[0]) not in allowed:
            raise ConfigError(
                f"--odyssey-inject {text!r}: {key}={values[key]} is unknown; use one of "
                + ", ".join(allowed)
                + "."
            )
    if 0 <= values.get("until", -1) <= values["step"]:
        raise ConfigError(
            f"--odyssey-inject {text!r}: until={values['until']} is not behind step={values['step']}. It is the first "
            "step that is as it was before."
        )
    return kind(**values)


_READ: dict[str, Between | type[_Link]] = {
    "rank": COUNT,
    "incarnation": COUNT,
    "step": WHOLE,
    "microbatch": WHOLE,
    "generation": WHOLE,
    "until": COUNT,
    "slow": SLOWER,
    "link": _Link,
}
