"""The events of a run, as they stand in the journal: the one source of their names and fields."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from odyssey_megatron.inputs import FINITE, Between

SCHEMA_VERSION = 3
"""Version of the journal. It goes up when a field changes its meaning or goes away, not for new fields or events."""

COMMON_FIELDS = (
    "schema_version", "event", "t_s", "wall_s", "clock", "job", "source", "generation", "step", "rank",
)  # fmt: skip
"""Fields of every line. ``t_s``: the node's monotonic clock, comparable where ``clock`` is the same.
``wall_s``: seconds since the epoch, for people. ``job``: the same on all lines of a job, as a folder may be
used again. ``source``: ``rank3`` or ``agent0``. ``step``: the step being worked on, counted from 0; -1 where
there is none.
"""

CLOCK_READINGS = ("agreed_s", "in_groups_s", "launched_s", "resumed_s")
"""Fields that hold the ``t_s`` of some moment, and say nothing by themselves."""

STALLS = {"recovered": ("decide_s", "abort_s", "groups_s", "agree_s", "transfer_s")}
"""For each event, its durations in which this rank did not train, one after the other."""

SLOW_LINK = "slow link"
SLOW_SUMS = "slow sums"
LINK_KINDS = (SLOW_LINK, "slow network", SLOW_SUMS)
"""Kinds of ``slowness`` of messages. Their ``slow_ranks`` are the ends of a slow link, the ranks whose
network is slow, or the ranks that sum.
"""

_Fields = dict[str, tuple[str, ...]]
OF_AGENTS: _Fields = {
    "job_started": ("world_size", "nodes", "observes", "inject", "launched_s"),
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
    "stood_still": ("lasted_s",),
    "rank_joined": ("target",),
    "given_up": ("target", "slot", "host"),
    "readmitted": ("target", "slot", "host"),
    "place_taken": ("target", "spare"),
    "cell_shrinks": ("ranks", "whole"),
    "offer_failed": ("why",),
    "slowness": ("kind", "slow_ranks", "speed", "why"),
    "replaced": ("slow_ranks", "cost_s"),
    "set_aside": ("slow_ranks", "cost_s"),
    "measured": ("factors", "costs"),
    "expert_loads": ("loads", "experts"),
    "asked": ("signal", "how"),
    "job_finished": ("verdict", "exit_code"),
}
"""The events that agents and the coordinator write, and ranks do not."""

EVENTS: _Fields = {
    **OF_AGENTS,
    # -- ranks
    "injected": ("at", "signal", "microbatch", "faults"),
    "slowed": ("slow", "faults"),
    "link_slowed": ("receiver", "slow", "faults"),
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
"""For each event, the fields of its own.

A field means the same in each event: ``dead`` is a list of ranks everywhere, and ``causes`` says what each of
them has died of (``cell``: another rank of its cell has; others: ``RankDied.cause``).

- ``job_started``: one that ``observes`` (``--odyssey observe``) trains without noting its steps. ``inject``: the
  value of ``--odyssey-inject``, if there is one. ``launched_s``: when ``odyssey run`` began on the first node, on the
  clock of ``t_s``; not with ``odyssey host``.
- ``injected``, ``slowed``, ``link_slowed``: ``faults`` are the numbers, from 0, of the faults in that value that
  strike here.
- ``decision``: one that is ``planned`` is an offer, and counts once it was ``switched`` to. ``cell_size``:
  the number of ranks of a whole worker. ``shapes``: [worker, number of ranks] for smaller ones;
  below schema version 3 [worker, places of a whole cell that each of its ranks fills].
- ``generation_agreed``: ``agreed_s`` by the clock of the job's host; see ``generation_started``.
- ``stood_still``: the process of the coordinator was stopped, or got no processor, for the ``lasted_s`` before this.
- ``given_up``: rank ``target`` has died too often in ``slot``, the number of its GPU on the node, which is taken
  for broken. ``readmitted``: that GPU works again, and ``target``, which may be another rank, starts there.
- ``cell_shrinks``: what is left of a cell of ``whole`` ranks joins as ``ranks``.
- ``slowness``: something makes steps longer, or no longer does. ``slow_ranks``: those of a slow worker; its
  ``speed`` is 1 if it is healthy.
- ``replaced``: slow ranks have left for fresh processes to take their place. ``cost_s``: seconds of training
  that their slowness had cost. ``set_aside``: their cell has left, and goes on without them.
- ``measured``, now and then: ``factors`` are [worker, how many times as long its work takes as elsewhere],
  ``costs`` are [first layer, the layer behind the last one, kind of work, seconds on a healthy worker].
- ``expert_loads``: [number of ranks of a gang, tokens of its busiest rank], relative to the mean of a whole gang's
  ranks, as a mean over layers. ``experts``: those of a layer that each rank of a whole gang has.
- ``slowed``: the compute of this rank takes ``slow`` times its time from here on, as was asked for.
  ``link_slowed``: messages from this rank to rank ``receiver`` do.
- ``generation_started``: ``agreed_s`` is the ``t_s`` when all members had said how far they were, which is
  the same moment on all hosts (``timeline.py``).
- ``recovered``, one line for each surviving rank: ``in_groups_s`` and ``resumed_s`` are the ``t_s`` when the
  rank was in all its new groups, and when it ran the first instruction of the next step. The other ``*_s``
  are durations, each by the clock of one process. ``outcome``: ``resume`` (the interrupted step went on where
  it was), ``redo`` (it was done again) or ``finish`` (it had been agreed on). ``eager_forwards``: the number
  of the dead workers' forwards that others had run ahead, so that they were not done again.
- ``switched``: a generation that began between two steps. Training stood still for ``groups_s``, ``agree_s``
  and ``transfer_s``, and behind its first step for ``fill_s``, until all its layers were there.
- ``redone``: seconds from the recovery until the step was committed.
- ``step_committed``: ``loss`` is a dict of named losses. A step that is ``skipped`` has changed no weight, as
  its loss scale was too large. ``step_s`` is -1 where it was not timed.
- ``step_dealt``: the cost of the dearest route, as a multiple of its share, in the ``natural`` order of the
  microbatches and as ``dealt``, by what is expected of their sequences.
- ``samples``, of the rank that ran a microbatch through the head: for each of ``microbatches``, the list of
  its global sample indices.
- ``trace``: [[text, start_s, end_s], ...] on the monotonic clock.
- ``weights``: at the end of a rank, by layer.
- ``saved``: before ``step`` all ranks waited ``save_s`` for a checkpoint, or for a part of a save in the background,
  whatever it came to. ``not_saved``, behind it: the checkpoint of iteration ``step`` is missing.
- ``left_out``, of a rank that stays: rank ``target`` leaves, since its numbers are wrong.
- ``cut_short``: how a message or another operation of this rank failed, for example because a peer has died.
- ``lines_lost``: the number of lines of this process, before this one, that could not be written.
"""

_Id = Annotated[int, Between(-1, 2**53, whole=True)]
_Seconds = Annotated[float, FINITE]


class _Line(TypedDict):
    """The fields of every line; see ``COMMON_FIELDS``."""

    schema_version: int
    event: str
    t_s: _Seconds
    wall_s: Annotated[float, Between(0, 2**40)]
    source: str
    generation: _Id
    step: _Id
    rank: _Id


class Candidate(TypedDict, total=False):
    """A row of the ``candidates`` of a ``decision``: ``plan.sending.generation.CandidateRow``."""

    name: str
    step_s: float | None
    transition_s: float | None
    score: float | None
    chosen: bool
    reason: str


class JournalLine(_Line, total=False):
    """One line of a journal. A field means the same in each event that has it."""

    clock: str
    job: str
    world_size: _Id
    nodes: Any
    observes: bool
    inject: str
    launched_s: _Seconds
    target: _Id
    spare: _Id
    slot: _Id
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
    loads: tuple[tuple[_Id, _Seconds], ...]
    experts: _Id
    costs: tuple[tuple[_Id, _Id, str, _Seconds], ...]
    verdict: str
    exit_code: int
    at: str
    signal: str
    microbatch: _Id
    faults: tuple[_Id, ...]
    kind: str
    slow_ranks: tuple[_Id, ...]
    cost_s: _Seconds
    speed: _Seconds
    slow: Annotated[float, Between(1, 1e6)]
    receiver: _Id
    members: tuple[_Id, ...]
    agreed_s: _Seconds | None
    lasted_s: _Seconds
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
    tokens: _Id
    num_microbatches: _Id
    natural: Annotated[float, FINITE]
    dealt: Annotated[float, FINITE]
    microbatches: tuple[_Id, ...]
    samples: tuple[tuple[_Id, ...], ...]
    instructions: tuple[tuple[str, _Seconds, _Seconds], ...]
    digest: Any
    count: _Id
    state_bytes: Any
    optimizer_bytes: Any
    host_bytes: Any
