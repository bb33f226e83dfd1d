"""The events of a run, as they stand in the journal. One source for their names and fields."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from odyssey_megatron.inputs import FINITE, Between

SCHEMA_VERSION = 2
"""Raised when a field changes its meaning or goes away; new fields and events do not raise it."""

COMMON_FIELDS = (
    "schema_version", "event", "t_s", "wall_s", "clock", "job", "source", "generation", "step", "rank",
)  # fmt: skip
"""On every line. ``t_s``: monotonic clock of the node, comparable where ``clock`` is the same; ``wall_s``: seconds
since the epoch, for people; ``job``: the same on all lines of a job, as a folder may be used again; ``source``:
``rank3`` or ``agent0``; ``step``: the step being worked on, counted from 0; -1 where there is none."""

CLOCK_READINGS = ("agreed_s", "in_groups_s", "resumed_s")
"""Fields that are ``t_s`` of some moment, and say nothing by themselves."""

STALLS = {"recovered": ("decide_s", "abort_s", "groups_s", "agree_s", "transfer_s")}
"""Event -> its durations in which this rank did not train, one after the other."""

SLOW_LINK = "slow link"
SLOW_SUMS = "slow sums"
LINK_KINDS = (SLOW_LINK, "slow network", SLOW_SUMS)
"""Kinds of ``slowness`` that are of messages: their ``slow_ranks`` are the ends of a link, whose network it is, or who
sums.
"""

EVENTS: dict[str, tuple[str, ...]] = {
    # -- agents and coordinator
    "job_started": ("world_size", "nodes"),
    "rank_started": ("target", "pid", "host"),
    "failure_detected": ("dead", "code", "cause", "causes"),
    "decision": (
        "dead",
        "why",
        "policy",
        "plan_hash",
        "candidates",
        "decide_s",
        "schedule",
        "layout",
        "planned",
        "cell_size",
        "shapes",
    ),
    "generation_agreed": ("agreed_s",),
    "rank_joined": ("target",),
    "place_taken": ("target", "spare"),
    "cell_shrinks": ("ranks", "whole"),
    "offer_failed": ("why",),
    "slowness": ("kind", "slow_ranks", "speed", "why"),
    "replaced": ("slow_ranks", "cost_s"),
    "set_aside": ("slow_ranks", "cost_s"),
    "measured": ("factors", "costs"),
    "asked": ("signal", "how"),
    "job_finished": ("verdict", "exit_code"),
    # -- ranks
    "injected": ("at", "signal", "microbatch"),
    "slowed": ("slow",),
    "link_slowed": ("receiver", "slow"),
    "generation_started": ("members", "plan_hash", "policy", "agreed_s"),
    "recovered": (
        "dead",
        "policy",
        "plan_hash",
        "decide_s",
        "abort_s",
        "agree_s",
        "groups_s",
        "transfer_s",
        "in_groups_s",
        "resumed_s",
        "outcome",
        "eager_forwards",
    ),
    "switched": ("policy", "plan_hash", "groups_s", "agree_s", "transfer_s", "fill_s"),
    "redone": ("redo_s",),
    "step_committed": ("loss", "grad_norm", "lr", "skipped", "step_s", "tokens", "num_microbatches"),
    "step_dealt": ("natural", "dealt"),
    "samples": ("microbatches", "samples"),
    "trace": ("instructions",),
    "weights": ("digest", "state_bytes", "optimizer_bytes", "host_bytes"),
    "saved": ("save_s",),
    "not_saved": ("why",),
    "left_out": ("target", "host", "why"),
    "cut_short": ("why",),
    "fenced": ("why",),
    "stopped": ("why", "exit_code"),
    # -- all
    "lines_lost": ("count",),
}
"""Event name -> its own fields.

``generation_started``: ``agreed_s`` = ``t_s`` when all members had said how far they were, the same moment on all
hosts (``timeline.py``); ``generation_agreed``: by the clock of the job's host. ``decision``: a ``planned`` one is
offered, and counts once it was ``switched`` to.
``recovered`` (one line a surviving rank): ``in_groups_s`` and ``resumed_s`` = ``t_s`` when the rank was in all its new
groups, and when it ran the first instruction of the next step; the other ``*_s`` are durations, each by the clock of
one process; ``outcome`` is ``resume`` (the interrupted step went on where it was),
``redo`` (it was done again) or ``finish`` (it had been agreed on); ``eager_forwards``: how many forwards of the dead
others had run ahead, so that they were not done again. ``redone``: how long the step took from there until
it was committed. ``switched``: a generation that began between two steps; ``groups_s``, ``agree_s`` and ``transfer_s``
stood still, while ``fill_s`` ran behind the first step. ``samples`` (the rank that ran a microbatch
through the head): ``samples`` holds, for each of ``microbatches``, the list of its global sample indices.
``saved``: before ``step`` all waited for ``save_s``, for a checkpoint. ``weights``: at the end of a rank, by layer.
``step_committed``: ``loss`` is a dict of named losses; one that is ``skipped`` has changed no weight, as its loss scale
was too large; ``step_s`` is -1 where it was not timed. ``step_dealt``: how many times
its share the route would have cost that is dearest in the ``natural`` order of its microbatches, by what is expected of
their sequences, and as ``dealt``. ``trace``: [[text, start_s, end_s], ...] on the monotonic
clock. ``dead`` is a list of ranks everywhere, ``causes`` what each of them has died of (``cell``: another rank of its
own has). ``left_out`` (of a rank that stays): rank ``target`` leaves, since its numbers are wrong.
``cut_short``: how a message or another operation of this rank failed, be it since a peer has died.
``slowness``: what makes steps longer, or does no more: ``slow_ranks`` of a slow worker, whose
``speed`` is 1 if it is healthy. ``replaced``: slow ranks have left for fresh processes to take their place; ``cost_s``
of training is what their slowness had cost; ``set_aside``: their cell has left, and goes on without them. ``measured``,
now and then: ``factors`` are [worker, so many times what its work takes elsewhere], ``costs`` [first layer, behind the
last one, kind of work, seconds on a healthy worker].
``cell_size``: ranks of a whole worker; ``shapes``: [worker, places that each of its ranks fills] of smaller ones.
``cell_shrinks``: what is left of a cell of ``whole`` ranks joins as ``ranks``. ``slowed``: the compute of this rank
takes ``slow`` times its time from here on, as was asked for; ``link_slowed``: messages from it to rank ``receiver`` do.
``lines_lost``: so many lines of this process, before this one, could not be written.
"""

_Id = Annotated[int, Between(-1, 2**53, whole=True)]
_Seconds = Annotated[float, FINITE]


class _Line(TypedDict):
    """What stands on every line; see ``COMMON_FIELDS``."""

    schema_version: int
    event: str
    t_s: _Seconds
    wall_s: Annotated[float, Between(0, 2**40)]
    source: str
    generation: _Id
    step: _Id
    rank: _Id


class Candidate(TypedDict, total=False):
    """A row of ``decision``'s ``candidates``: ``plan.generation.CandidateRow``."""

    name: str
    step_s: float | None
    transition_s: float | None
    score: float | None
    chosen: bool
    reason: str


class Line(_Line, total=False):
    """One line of a journal. A field means the same in each event that has it."""

    clock: str
    job: str
    world_size: _Id
    nodes: Any
    target: _Id
    spare: _Id
    pid: _Id
    dead: tuple[_Id, ...]
    code: Any
    cause: str
    causes: tuple[str, ...]
    host: str
    why: str
    how: str
    policy: str
    plan_hash: str
    candidates: tuple[Candidate, ...] | None
    decide_s: _Seconds
    schedule: str
    layout: Any
    planned: bool
    cell_size: Annotated[int, Between(1, 2**20, whole=True)]
    shapes: tuple[tuple[_Id, _Id], ...]
    ranks: tuple[_Id, ...]
    whole: _Id
    factors: tuple[tuple[_Id, _Seconds], ...]
    costs: tuple[tuple[_Id, _Id, str, _Seconds], ...]
    verdict: str
    exit_code: int
    at: str
    signal: str
    microbatch: _Id
    kind: str
    slow_ranks: tuple[_Id, ...]
    cost_s: _Seconds
    speed: _Seconds
    slow: Annotated[float, Between(1, 1e6)]
    receiver: _Id
    members: tuple[_Id, ...]
    agreed_s: _Seconds | None
    detected_s: _Seconds | None
    abort_s: _Seconds | None
    agree_s: _Seconds | None
    groups_s: _Seconds | None
    transfer_s: _Seconds | None
    in_groups_s: _Seconds | None
    resumed_s: _Seconds | None
    outcome: str
    eager_forwards: _Id
    fill_s: _Seconds | None
    redo_s: _Seconds
    save_s: _Seconds
    loss: dict[str, float]
    grad_norm: float | None
    lr: float | None
    skipped: bool
    step_s: _Seconds
    tokens: int
    num_microbatches: _Id
    natural: Annotated[float, FINITE]
    dealt: Annotated[float, FINITE]
    microbatches: tuple[_Id, ...]
    samples: tuple[tuple[_Id, ...], ...]
    instructions: tuple[tuple[str, _Seconds, _Seconds], ...]
    observations: Any
    digest: Any
    count: _Id
    state_bytes: Any
    optimizer_bytes: Any
    host_bytes: Any
