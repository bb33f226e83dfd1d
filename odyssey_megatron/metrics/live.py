"""The state of a job as people see it, while it runs and after it has ended, from its journal alone.

The terminal (``watch/screen.py``), the page (``metrics/map.py``, ``watch/page.py``), Prometheus
(``watch/exposition.py``) and the report show this state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from odyssey_megatron.metrics.commits import NO_COMMITS, Commits
from odyssey_megatron.metrics.goodput import Goodput, goodput, saves
from odyssey_megatron.metrics.recoveries import DecisionRecord, RecoveryRecord, decisions, named, recoveries
from odyssey_megatron.metrics.standing import JobStanding, standing
from odyssey_megatron.metrics.steps import CommittedStep, committed_steps
from odyssey_megatron.metrics.suspects import Suspect, suspects
from odyssey_megatron.metrics.switches import Switch, switches
from odyssey_megatron.metrics.timeline import JournalEvent, known

_RECENT = 20
"""The number of newest steps that tell how fast the job is now."""
_SHOWN_STEPS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A time in which nobody trained."""

    step: int
    generation: int
    cause: str
    """``killed``, ``hang``, …; or the reason why the plan changed."""
    ranks: tuple[int, ...]
    policy: str
    outcome: str
    stall_s: float | None
    """The duration; None if it is not over, or the next one began before it was."""
    is_failure: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause that makes steps longer than they need to be, and is not over."""

    kind: str
    ranks: tuple[int, ...]
    factor: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds that a piece of work takes on a healthy worker, fitted to all measurements."""

    first: int
    last: int
    kind: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A GPU that is taken for broken, as ``rank`` has died there too often; ``odyssey readmit`` brings it back."""

    rank: int
    slot: int
    """The number of the GPU on its node."""
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Everything that is shown of a job."""

    name: str
    job: str = ""
    world_size: int = 0
    started_s: float | None = None
    """Start of the job in seconds since the epoch, by the first agent's clock, as all times here."""
    heard_s: float | None = None
    """Time of the newest line of the journal."""
    verdict: str | None = None
    """How the job ended; None: it has not."""
    observes: bool = False
    """Whether Odyssey only looks on, so that no steps are in the journal."""
    steps: tuple[CommittedStep, ...] = ()
    """The newest steps."""
    committed: int = 0
    """Number of steps committed in all."""
    step_s: float | None = None
    """Median time of the newest steps, without what they waited for checkpoints."""
    policy: str = ""
    """That of the plan in force; "" if it is not known."""
    planned_step_s: float | None = None
    """Step time that the decision expected of the plan in force."""
    tokens_per_s: float | None = None
    goodput: Goodput = field(default_factory=Goodput)
    stalls: tuple[Stall, ...] = ()
    standing: JobStanding = field(default_factory=JobStanding)
    decision: DecisionRecord | None = None
    """The last decision that weighed candidates."""
    findings: tuple[Finding, ...] = ()
    given_up: tuple[GivenUp, ...] = ()
    costs: tuple[Cost, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    saves_failed: int = 0
    """Number of checkpoints that could not be saved."""
    not_saved: str = ""
    """Which checkpoint could not be saved and why, until a later one could."""

    @property
    def is_over(self) -> bool:
        return self.verdict is not None

    @property
    def living(self) -> int:
        return self.world_size - len(self.standing.dead)

    @property
    def status(self) -> str:
        """The status in a word."""
        if self.verdict is not None:
            return "ended"
        if self.standing.is_recovering:
            return "recovering"
        return "observed" if self.observes else "trains" if self.committed else "starting"


def live(name: str, events: Sequence[JournalEvent], older: Commits = NO_COMMITS) -> Live:
    """Return the state after ``events`` (``timeline.last_job``).

    Args:
        older: Steps before the ones in ``events`` (``follow.Follower``).

    Raises KeyError, TypeError or ValueError if they are not a journal's events.
    """
    steps, recovered, switched = committed_steps(events), recoveries(events, older), switches(events)
    commits, decided = older.and_of(events), decisions(events)
    weighed = [one for one in decided if one.candidates]
    started = named(events, "job_started")
    world_size = max((event["world_size"] for event in started), default=0)
    now = standing(events, world_size)
    step_s = _step_s(steps[-_RECENT:], saves(events))
    tokens = commits.tokens[-_RECENT:].tolist()
    return Live(
        name=name,
        job=str(started[-1].get("job", "")) if started else "",
        world_size=world_size,
        started_s=min(known(event["at_s"] for event in started), default=None),
        heard_s=max(known(event["at_s"] for event in events), default=None),
        verdict=next((one["verdict"] for one in reversed(named(events, "job_finished"))), None),
        observes=any(one.get("observes") for one in started),
        steps=steps[-_SHOWN_STEPS:],
        committed=len(commits),
        step_s=step_s,
        policy=next((one.policy for one in decided if one.generation == now.generation), ""),
        planned_step_s=_planned_s(decided, now.generation),
        tokens_per_s=sum(tokens) / len(tokens) / step_s if tokens and step_s else None,
        goodput=goodput(events, commits, recovered, switched),
        stalls=_stalls(recovered, switched),
        standing=now,
        decision=weighed[-1] if weighed else None,
        findings=_findings(events),
        given_up=_given_up(events),
        costs=_costs(events, now.num_layers),
        suspects=suspects(events),
        saves_failed=len(named(events, "not_saved")),
        not_saved=_not_saved(events),
    )


def _step_s(steps: Sequence[CommittedStep], saves_s: Mapping[int, float]) -> float | None:
    times_s = sorted(row.interval_s - saves_s.get(row.step, 0.0) for row in steps if row.interval_s)
    return max(0.0, times_s[len(times_s) // 2]) if times_s else None


def _stalls(recovered: Sequence[RecoveryRecord], switched: Sequence[Switch]) -> tuple[Stall, ...]:
    found = [
        Stall(
            step=row.step,
            generation=row.generation,
            cause=row.cause or "fresh groups",
            ranks=row.dead,
            policy=row.policy,
            outcome=row.outcome,
            stall_s=row.stall_s,
            is_failure=True,
        )
        for row in recovered
    ] + [
        Stall(
            step=one.step,
            generation=one.generation,
            cause=one.why,
            ranks=one.joined,
            policy=one.policy,
            outcome="between steps",
            stall_s=one.stall_s,
            is_failure=False,
        )
        for one in switched
    ]
    return tuple(sorted(found, key=lambda one: one.generation))


def _planned_s(decided: Sequence[DecisionRecord], generation: int) -> float | None:
    rows: list[dict[str, Any]] = [
        row for one in decided if one.generation == generation for row in one.candidates if row.get("chosen")
    ]
    return rows[0].get("step_s") if rows else None


def _findings(events: Sequence[JournalEvent]) -> tuple[Finding, ...]:
    found: dict[tuple[str, tuple[int, ...]], Finding] = {}
    for event in named(events, "slowness"):
        ranks = tuple(event.get("slow_ranks", ()))
        key = event["kind"], ranks
        found.pop(key, None)
        if event["speed"] < 1.0:
            factor = 1 / max(event["speed"], 1e-9)
            found[key] = Finding(kind=event["kind"], ranks=ranks, factor=factor, why=event.get("why", ""))
    return tuple(found.values())


def _not_saved(events: Sequence[JournalEvent]) -> str:
    failed, later, is_over = dict[str, Any](), 0, False
    for event in events:
        if event["event"] == "not_saved":
            failed, later = event, 0
        later += event["event"] == "saved"
        is_over |= event["event"] == "job_finished"
    # "saved" comes before "not_saved"; of a save in the background also as it begins, when it may still fail.
    if not failed or later > (not is_over):
        return ""
    return f"the checkpoint of iteration {failed['step']} was not saved: {failed['why']}"


def _given_up(events: Sequence[JournalEvent]) -> tuple[GivenUp, ...]:
    found: list[GivenUp] = []
    for event in events:
        kind, rank, host = event["event"], event.get("target"), event.get("host")
        if kind in ("given_up", "readmitted"):
            found = [one for one in found if (one.host, one.slot) != (host, event["slot"])]
        if kind == "given_up":
            found.append(GivenUp(rank=event["target"], slot=event["slot"], host=event["host"]))
        elif kind == "rank_started":  # on the node that came in the place of its own
            found = [one for one in found if one.rank != rank or one.host == host]
    return tuple(found)


def _costs(events: Sequence[JournalEvent], num_layers: int) -> tuple[Cost, ...]:
    measured = named(events, "measured")
    return tuple(
        Cost(first=first, last=last, kind=kind, seconds=seconds)
        for first, last, kind, seconds in (measured[-1]["costs"] if measured else ())
        if 0 <= first < last <= num_layers
    )
