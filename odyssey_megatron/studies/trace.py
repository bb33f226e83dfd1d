"""Failure traces, and how each system fares in them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from odyssey_megatron.cluster.state import ClusterState, WorkerState
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.inputs import Between
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.decide import decide, scheduled
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.studies.baselines import Running, System, World

MAX_CHANGES = 10_000
"""The most changes in a trace: each is decided on under every policy, which takes about a second for 4,096 workers."""
TRACE_S = Between(0.001, 1e9)
"""The range of times and intervals in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChange:
    """At ``t_s`` some workers die and others come back."""

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
    """(since, tokens per second from then on, note)."""


def monotone(workers: Sequence[int], interval_s: float, count: int, seed: int = 0) -> FailureTrace:
    """Return a trace in which a worker dies every ``interval_s``, ``count`` of them, and none comes back."""
    victims = random.Random(seed).sample(sorted(workers), count)
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
    workers: Sequence[int], *, mtbf_s: float, repair_s: float, duration_s: float, seed: int = 0
) -> FailureTrace:
    """Return a trace with exponential times between failures and exponential repair times; at most half of the workers
    are down.

    Raises:
        ValueError: so many failures are expected that playing them would take too long.
    """
    if duration_s > MAX_CHANGES / 2 * mtbf_s:
        raise ValueError(
            f"a failure every {mtbf_s:g} s for {duration_s:g} s are {duration_s / mtbf_s:,.0f}, and at most "
            f"{MAX_CHANGES // 2:,} with their repairs are played: raise --mtbf-s or lower --duration-s"
        )
    rng = random.Random(seed)
    events: list[tuple[float, int, bool]] = []
    down: dict[int, float] = {}
    now = rng.expovariate(1 / mtbf_s)
    while now < duration_s:
        down = {worker: until for worker, until in down.items() if until > now}
        up = [worker for worker in sorted(workers) if worker not in down]
        if 2 * len(up) > len(workers):
            victim = rng.choice(up)
            down[victim] = now + rng.expovariate(1 / repair_s)
            events += [(now, victim, False), (down[victim], victim, True)]
        now += rng.expovariate(1 / mtbf_s)
    changes = tuple(
        ClusterChange(t_s=t_s, died=() if back else (worker,), joined=(worker,) if back else ())
        for t_s, worker, back in sorted(events)
        if t_s < duration_s
    )
    name = f"random, mean {_duration(mtbf_s)}, repair {_duration(repair_s)}"
    return FailureTrace(name=name, changes=changes, duration_s=duration_s, mtbf_s=mtbf_s / 2)


def read_trace(text: str, workers: Sequence[int], name: str = "file") -> FailureTrace:
    """Read lines ``seconds kill|join WORKER``, closed by ``seconds end``; ``#`` starts a comment.

    Raises:
        ValueError: a line cannot be read, or is impossible for ``workers``, all of which live at first.
    """
    lines = text.splitlines()
    parsed = [one for one in enumerate(map(_words, lines), 1) if one[1]]
    if len(parsed) > MAX_CHANGES + 1:
        raise ValueError(f"it has {len(parsed) - 1:,} changes, and at most {MAX_CHANGES:,} are played")
    changes, end = [], 0.0
    for number, words in parsed:
        try:
            if len(words) == 2 and words[1] == "end":
                end = max(end, TRACE_S.read(words[0]))
            elif len(words) == 3 and words[1] in ("kill", "join"):
                changes.append((number, _change(words, workers)))
            else:
                raise ValueError("'SECONDS kill|join WORKER' or 'SECONDS end' is expected")
        except ValueError as error:
            raise ValueError(f"line {number}, {lines[number - 1][:40]!r}: {error}") from None
    changes.sort(key=lambda one: one[1].t_s)
    if not end > (changes[-1][1].t_s if changes else 0.0):
        raise ValueError("it must close with 'SECONDS end', after its last change")
    alive = set(workers)
    for number, change in changes:
        if not alive.issuperset(change.died) or not alive.isdisjoint(change.joined):
            state = "dead" if change.died else "alive"
            raise ValueError(f"line {number}, {lines[number - 1][:40]!r}: the worker is {state} by then")
        alive = (alive - set(change.died)) | set(change.joined)
    found = tuple(change for _, change in changes)
    return FailureTrace(name=name, changes=found, duration_s=end, mtbf_s=end / max(1, len(found)))


def _words(line: str) -> list[str]:
    return line.split("#")[0].split()


def _change(words: Sequence[str], workers: Sequence[int]) -> ClusterChange:
    t_s, who = Between(0, TRACE_S.high).read(words[0]), Between(0, max(workers), whole=True).read(words[2])
    return (
        ClusterChange(t_s=t_s, died=(who,)) if words[1] == "kill" else ClusterChange(t_s=t_s, joined=(who,))
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"


class Odyssey(System):
    """This planner, free or held to one policy, with ``--odyssey-layout``."""

    def __init__(self, policy: str = "auto", layout: str = "megatron") -> None:
        super().__init__(ours=True)
        self.name = "odyssey" if policy == "auto" else f"only {policy}"
        if layout != "megatron":
            self.name += f", layout {layout}"
        self.policy, self.layout = policy, layout
        self.plan: Plan | None = None

    def start(self, world: World) -> Running:
        job = replace(world.job, best_layout=self.layout == "auto")
        self.plan = initial_plan(job, self._state(world, world.workers), world.profile)
        return Running(layout=self.plan.layout, step_s=self.plan.step_s, downtime_s=0.0)

    def change(self, world: World, running: Running, alive: tuple[int, ...]) -> Running:
        if self.plan is None or running.layout is None:
            return self._restart(world, alive)
        config = OdysseyConfig(policy=self.policy, mtbf_s=world.mtbf_s, horizon_s=world.mtbf_s * 4)
        previous = replace(self.plan, layout=running.layout)
        try:
            decision = decide(
                job=world.job,
                state=self._state(world, alive),
                previous=previous,
                profile=world.profile,
                config=config,
                now_s=0.0,
            )
        except (LayersLost, PlanInfeasible):
            return self._restart(world, alive)
        self.plan = decision.plan
        return Running(
            layout=self.plan.layout,
            step_s=self.plan.step_s,
            downtime_s=self.plan.transition_s,
            note=decision.candidates[0].name,
        )

    def _restart(self, world: World, alive: tuple[int, ...]) -> Running:
        """Restart as other systems do, in the launch line's layout, but in our order."""
        running = self.restarted(world, alive, "restart")
        if running.layout is not None:
            state = self._state(world, alive)
            try:
                self.plan = scheduled("restart", running.layout, (), state, world.profile)
            except PlanInfeasible:  # on fewer replicas, more of the optimizer's state is on each
                return Running(layout=None, step_s=math.inf, downtime_s=0.0, note="out of memory")
        return running

    def _state(self, world: World, alive: Sequence[int]) -> ClusterState:
        there = set(alive)
        return ClusterState(
            workers=tuple(
                WorkerState(worker=worker, node=0, ranks=(worker,), alive=worker in there)
                for worker in world.workers
            )
        )


def play(system: System, world: World, trace: FailureTrace) -> Played:
    """Play ``trace``: tokens are trained whenever the system does not stand still.

    A death in the middle of a step costs half a step on average, which is done again. A change during a downtime starts
    the next downtime.
    """
    running = system.start(world)
    alive = set(world.workers)
    now, tokens, still, restarts = 0.0, 0.0, 0.0, 0
    ready = _ready_s(now, running)
    history = [(0.0, _rate(world, running), "healthy")]
    for change in (*trace.changes, ClusterChange(t_s=trace.duration_s)):
        tokens += max(0.0, change.t_s - max(now, ready)) * _rate(world, running)
        still += max(0.0, min(change.t_s, ready) - now)
        now = change.t_s
        if now >= trace.duration_s:
            break
        alive = (alive - set(change.died)) | set(change.joined)
        half_step_s = running.step_s / 2 if math.isfinite(running.step_s) else 0.0
        running = system.change(world, running, tuple(sorted(alive)))
        restarts += running.restarted
        ready = _ready_s(now, running) + (half_step_s if change.died else 0.0)
        history.append((now, _rate(world, running), running.note))
    return Played(
        system=system.name,
        tokens_per_s=tokens / trace.duration_s,
        downtime_s=still,
        restarts=restarts,
        history=tuple(history),
    )


def _ready_s(now_s: float, running: Running) -> float:
    """When it trains; what cannot run stands still."""
    return now_s + running.downtime_s if math.isfinite(running.step_s) else math.inf


def _rate(world: World, running: Running) -> float:
    return world.job.tokens_per_step / running.step_s if math.isfinite(running.step_s) else 0.0


def compare(systems: Sequence[Callable[[], System]], world: World, trace: FailureTrace) -> tuple[Played, ...]:
    """Play the same trace with every system; the best first."""
    told = replace(world, mtbf_s=trace.mtbf_s)
    played = [play(make(), told, trace) for make in systems]
    return tuple(sorted(played, key=lambda one: -one.tokens_per_s))
