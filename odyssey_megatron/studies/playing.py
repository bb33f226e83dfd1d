"""Plays failure traces, and says how each system fares in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from odyssey_megatron.studies.baselines import Running, System, World
from odyssey_megatron.studies.cells import CellsChange
from odyssey_megatron.studies.trace import FailureTrace


def _say_nothing(system: str, at_s: float) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How one system fared in a trace."""

    system: str
    tokens_per_s: float
    """Average over the whole trace."""
    downtime_s: float
    restarts: int
    """Number of restarts from a checkpoint, as the state of some layer was lost, or too few workers were left."""
    history: tuple[tuple[float, float, str], ...]
    """(since, tokens per second from then on, note); 0.0 while it stands still."""
    smaller: int = 0
    """The number of times that what was left of a cell went on as a smaller one, and computed."""


def play(
    system: System, world: World, trace: FailureTrace, say: Callable[[str, float], None] = _say_nothing
) -> Played:
    """Play ``trace``: tokens are trained whenever the system does not stand still.

    A death in the middle of a step costs half a step on average, which is done again; after a restart, that is part of
    what the restart costs. A change during a downtime starts the next downtime, unless the system goes on as it was.
    During a restart it starts that again, or waits for its end: nothing has its state before.

    Args:
        say: is told the system and the time in the trace, at the start and before each change.
    """
    say(system.name, 0.0)
    running = system.start(world)
    now, tokens, still, restarts = 0.0, 0.0, 0.0, 0
    ready, restarted_s = _ready_s(now, running), 0.0  # the latter is when its last restart has ended
    note = "healthy" if math.isfinite(running.step_s) else running.note
    history, smaller = [(0.0, _rate(world, running), note)], _Smaller()
    changes = takewhile(lambda one: one.t_s < trace.duration_s, system.cells(world, trace))
    for change in (*changes, CellsChange(t_s=trace.duration_s, alive=(), lost=False)):
        say(system.name, change.t_s)
        if now < ready < change.t_s:
            history.append((ready, _rate(world, running), running.note))
        tokens += max(0.0, change.t_s - max(now, ready)) * _rate(world, running)
        still += max(0.0, min(change.t_s, ready) - now)
        now = change.t_s
        if now >= trace.duration_s:
            break
        before, running = running, system.go_on(world, running, change)
        restarts += running.restarted
        if running != before.going_on:
            begun = now if running.restarted else max(now, restarted_s)
            in_a_step = change.lost and begun == now
            ready = _ready_s(begun, running) + (_done_again_s(before, running) if in_a_step else 0.0)
        restarted_s = ready if running.restarted else restarted_s
        history.append((now, _rate(world, running) if ready <= now else 0.0, running.note))
        smaller.note(running, change)
    return Played(
        system=system.name,
        tokens_per_s=tokens / trace.duration_s,
        downtime_s=still,
        restarts=restarts,
        history=tuple(history),
        smaller=smaller.times,
    )


class _Smaller:
    """Counts how often cells go on as smaller ones."""

    def __init__(self) -> None:
        self.times = 0
        self._known: set[tuple[int, int]] = set()
        """(worker, number of GPUs) of those that have computed since they came."""

    def note(self, running: Running, now: CellsChange) -> None:
        computing = set(running.layout.workers) if running.layout else set[int]()
        here = set(now.shapes.items())
        new = {one for one in here if one[0] in computing} - self._known
        self.times += len(new)
        self._known = (self._known & here) | new


def _ready_s(now_s: float, running: Running) -> float:
    """When it trains; what cannot run stands still."""
    return now_s + running.downtime_s if math.isfinite(running.step_s) else math.inf


def _done_again_s(before: Running, after: Running) -> float:
    """Time for the part of the interrupted step that had been done."""
    return before.step_s / 2 if math.isfinite(before.step_s) and not after.restarted else 0.0


def _rate(world: World, running: Running) -> float:
    return world.job.tokens_per_step / running.step_s if math.isfinite(running.step_s) else 0.0


def compare(
    systems: Sequence[Callable[[], System]],
    world: World,
    trace: FailureTrace,
    say: Callable[[str, float], None] = _say_nothing,
) -> tuple[Played, ...]:
    """Play the same trace with every system; the best first. ``say``: as in :func:`play`."""
    told = replace(world, mtbf_s=trace.mtbf_s)
    played = [play(make(), told, trace, say) for make in systems]
    return tuple(sorted(played, key=lambda one: -one.tokens_per_s))
