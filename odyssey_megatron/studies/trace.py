"""Failure traces: which GPUs fail and are repaired, and when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from odyssey_megatron.inputs import Between

MAX_CHANGES = 10_000
"""The most changes in a trace: each is decided on under every policy, which takes about a second for 4,096 workers."""
TRACE_S = Between(0.001, 1e9)
"""The range of times and intervals in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChange:
    """At ``t_s`` some GPUs, given by their ranks, die and others come back."""

    t_s: float
    died: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureTrace:
    """Changes, ascending in time, over ``duration_s``."""

    name: str
    changes: tuple[ClusterChange, ...]
    duration_s: float
    mtbf_s: float
    """The mean time between changes in which GPUs die: repairs are no failures."""


def monotone(gpus: Sequence[int], interval_s: float, count: int, seed: int = 0) -> FailureTrace:
    """Return a trace in which a GPU dies every ``interval_s``, ``count`` of them, and none comes back."""
    victims = random.Random(seed).sample(sorted(gpus), count)
    changes = tuple(
        ClusterChange(t_s=(i + 1) * interval_s, died=(victim,)) for i, victim in enumerate(victims)
    )
    return FailureTrace(
        name=f"one every {_duration(interval_s)}",
        changes=changes,
        duration_s=(count + 1) * interval_s,
        mtbf_s=interval_s,
    )


def with_repairs(
    gpus: Sequence[int],
    *,
    mtbf_s: float,
    repair_s: float,
    duration_s: float,
    seed: int = 0,
    node_share: float = 0.0,
    gpus_per_node: int = 1,
) -> FailureTrace:
    """Return a trace with exponential times between failures and exponential repair times; at most half of the GPUs
    are down.

    Args:
        node_share: the share of failures that take all GPUs of a node, which come back together.
        gpus_per_node: the node of a GPU is its rank divided by this.

    Raises:
        ValueError: so many failures are expected that playing them would take too long.
    """
    if duration_s > MAX_CHANGES / 2 * mtbf_s:
        raise ValueError(
            f"a failure every {mtbf_s:g} s for {duration_s:g} s are {duration_s / mtbf_s:,.0f}, and at most "
            f"{MAX_CHANGES // 2:,} with their repairs are played: raise --mtbf-s or lower --duration-s"
        )
    rng = random.Random(seed)
    events: list[tuple[float, tuple[int, ...], bool]] = []
    down: dict[int, float] = {}
    now = rng.expovariate(1 / mtbf_s)
    while now < duration_s:
        down = {gpu: until for gpu, until in down.items() if until > now}
        up = [gpu for gpu in sorted(gpus) if gpu not in down]
        if 2 * len(up) > len(gpus):
            victim = rng.choice(up)
            hit: tuple[int, ...] = (victim,)
            if node_share and rng.random() < node_share:
                node = tuple(gpu for gpu in up if gpu // gpus_per_node == victim // gpus_per_node)
                hit = node if 2 * (len(up) - len(node)) >= len(gpus) else hit
            back_s = now + rng.expovariate(1 / repair_s)
            down |= dict.fromkeys(hit, back_s)
            events += [(now, hit, False), (back_s, hit, True)]
        now += rng.expovariate(1 / mtbf_s)
    changes = tuple(
        ClusterChange(t_s=t_s, died=() if back else hit, joined=hit if back else ())
        for t_s, hit, back in sorted(events)
        if t_s < duration_s
    )
    name = f"random, mean {_duration(mtbf_s)}, repair {_duration(repair_s)}"
    if node_share:
        name += f", {node_share:.0%} of whole nodes"
    return FailureTrace(name=name, changes=changes, duration_s=duration_s, mtbf_s=mtbf_s)


def read_trace(text: str, gpus: int, name: str = "file", *, gpus_per_node: int = 0) -> FailureTrace:
    """Read lines ``seconds kill|join GPU``, closed by ``seconds end``; ``#`` starts a comment.

    A GPU is given by its rank, or as NODE:GPU. NODE:* are all GPUs of a node: those that live die, or the dead come
    back. Lines one after the other of the same kind and the same time are one change.

    Args:
        gpus: their number. All live at first.
        gpus_per_node: 0: all are on node 0.

    Raises:
        ValueError: a line cannot be read, or is impossible.
    """
    lines = text.splitlines()
    parsed = [one for one in enumerate(map(_words, lines), 1) if one[1]]
    if len(parsed) > MAX_CHANGES + 1:
        raise ValueError(f"it has {len(parsed) - 1:,} changes, and at most {MAX_CHANGES:,} are played")
    changes, end = list[tuple[float, int, bool, range]](), 0.0
    for number, words in parsed:
        try:
            if len(words) == 2 and words[1] == "end":
                end = max(end, TRACE_S.read(words[0]))
            elif len(words) == 3 and words[1] in ("kill", "join"):
                t_s, who = Between(0, TRACE_S.high).read(words[0]), gpus_at(words[2], gpus, gpus_per_node)
                changes.append((t_s, number, words[1] == "join", who))
            else:
                raise ValueError("'SECONDS kill|join GPU' or 'SECONDS end' is expected")
        except ValueError as error:
            raise ValueError(f"line {number}, {lines[number - 1][:40]!r}: {error}") from None
    changes.sort(key=lambda one: one[0])
    if not end > (changes[-1][0] if changes else 0.0):
        raise ValueError("it must close with 'SECONDS end', after its last change")
    dead, found = set[int](), list[ClusterChange]()
    for t_s, number, joins, who in changes:
        hit = tuple(gpu for gpu in who if (gpu in dead) == joins)
        if not hit:
            every = "every GPU of it" if len(who) > 1 else "the GPU"
            state = f"{every} is {'alive' if joins else 'dead'} by then"
            raise ValueError(f"line {number}, {lines[number - 1][:40]!r}: {state}")
        dead = dead.difference(hit) if joins else dead.union(hit)
        if found and found[-1].t_s == t_s and bool(found[-1].joined) == joins:
            last = found.pop()  # GPUs that go at the same time are one incident, which is recovered from once
            hit = (*(last.joined if joins else last.died), *hit)
        found.append(ClusterChange(t_s=t_s, died=() if joins else hit, joined=hit if joins else ()))
    failures = sum(bool(change.died) for change in found)
    return FailureTrace(name=name, changes=tuple(found), duration_s=end, mtbf_s=end / max(1, failures))


def gpus_at(place: str, gpus: int, gpus_per_node: int = 0) -> range:
    """Return the ranks of the GPUs at ``place``: a rank, NODE:GPU, or NODE:* for a whole node; see :func:`read_trace`.

    Raises:
        ValueError: there is no such GPU.
    """
    each = gpus_per_node or gpus
    node, colon, gpu = place.partition(":")
    try:
        if not colon:
            rank = int(Between(0, gpus - 1, whole=True).read(node))
        else:
            rank = int(Between(0, (gpus - 1) // each, whole=True).read(node)) * each
            if gpu == "*":
                return range(rank, rank + each)
            rank += int(Between(0, each - 1, whole=True).read(gpu))
    except ValueError:
        raise ValueError(f"{place[:40]}: no such GPU. Write NODE:GPU or a rank, 0..{gpus - 1}") from None
    return range(rank, rank + 1)


def _words(line: str) -> list[str]:
    return line.split("#")[0].split()


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"
