"""A job of several ranks in one process, on strict devices: the product's own runtime, recovery, groups and decisions.

Only what stands between processes is of this file: a coordinator that hears of deaths and publishes generations, and
each rank's line to it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from odyssey_megatron import recover
from odyssey_megatron.cluster.events import Ask, GenerationLive, RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import apply, initial_state, next_generation
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import JobStopped, LayersLost, Superseded
from odyssey_megatron.execute.rank import RankRuntime
from odyssey_megatron.plan.generation import Generation, Stop
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.slices import Span
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.policy.profile import Profile
from odyssey_megatron.rebuild.groups import build_groups
from tests.execute.stack import LAYERS, MICROBATCHES, Stack
from tests.strict.between_hosts import Hosts, Table
from tests.strict.communicators import Library, Wire
from tests.strict.device import DEVICE, DeviceMemory, on_device
from tests.strict.machine import Device, Host, Killed, Machine, this_host
from tests.strict.sliced import Sliced


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """``rank`` dies where its host comes by ``point`` of ``step``; by "connect" of any."""

    rank: int
    step: int
    point: str
    microbatch: int = -1
    generation: int = 0
    """0: any."""

    def is_due(self, point: str, step: int, generation: int, microbatch: int) -> bool:
        return (
            point == self.point
            and (step == self.step or point == "connect")
            and self.microbatch in (-1, microbatch)
            and self.generation in (0, generation)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job and what happens to it."""

    stages: int
    replicas: int
    profile: Profile
    steps: int = 3
    kills: tuple[Kill, ...] = ()
    flags: dict[str, Any] = field(default_factory=dict)
    virtual_stages: int = 1
    one_queue: bool = False
    copies: int = 0
    """Of each slice of optimizer state; 0: every holder keeps all."""

    @property
    def ranks(self) -> range:
        return range(self.stages * self.replicas)


class Coordinator:
    """Who lives, and which plan they carry out. Its own moves come whenever the machine lets it."""

    def __init__(self, case: Case, machine: Machine, config: OdysseyConfig):
        self.machine, self.config, self.profile = machine, config, case.profile
        self.job = JobSpec(
            num_layers=LAYERS, pipeline_model_parallel_size=case.stages, tensor_model_parallel_size=1,
            num_microbatches=MICROBATCHES, tokens_per_step=MICROBATCHES, train_steps=case.steps,
            least_holders=config.least_holders, eager_forwards=config.eager_forwards,
            virtual_stages=case.virtual_stages, optimizer_copies=case.copies,
        )  # fmt: skip
        state = initial_state(nodes=tuple(0 for _ in case.ranks))
        self.plan = initial_plan(self.job, state, self.profile)
        self.state = next_generation(state)
        self.live: Plan | None = None
        self.newest: Generation | Stop = self._generation(previous=None, dead=())
        self.dead: list[int] = []
        self.asked_again = False
        self.finished: set[int] = set()
        self.hears: dict[int, list[Callable[[], None]]] = {}
        machine.host("coordinator", self._decides)

    @property
    def done(self) -> bool:
        return set(self.state.ranks) <= self.finished

    def report_live(self, rank: int, number: int, done: int) -> None:
        self.state = apply(self.state, GenerationLive(rank=rank, generation=number, done=done))
        if self.state.is_live:
            self.live = self.plan

    def _decides(self) -> None:
        while True:
            this_host().wait(lambda: bool(self.dead) or self.asked_again or self.done)
            if self.done and not self.dead:
                return
            dead, self.dead, self.asked_again = tuple(self.dead), [], False
            for rank in dead:
                self.state = apply(self.state, RankDied(rank=rank, code=-9, cause="killed"))
            previous = self.live or self.plan
            try:
                self.plan = decide(
                    job=self.job, state=self.state, previous=previous, profile=self.profile, config=self.config,
                    now_s=1.0,
                ).plan  # fmt: skip
            except LayersLost as lost:
                self.newest = Stop(number=self.state.newest + 1, why=str(lost), code=93)
            else:
                if self.live is None:  # nobody has trained yet, and all make their layers
                    self.plan = replace(self.plan, transfers=(), transition_s=0.0)
                self.state = next_generation(self.state)
                self.newest = self._generation(previous=self.live, dead=dead)
            self.finished.clear()
            for rank in self.state.ranks:
                for hear in self.hears.get(rank, []):
                    hear()
            if isinstance(self.newest, Stop):
                return

    def _generation(self, previous: Plan | None, dead: tuple[int, ...]) -> Generation:
        return Generation(
            number=self.state.generation, members=tuple(sorted(self.state.members)), dead=dead, why="",
            previous=previous.layout if previous else None, plan=self.plan, plan_hash=self.plan.hash(),
        )  # fmt: skip


class Member:
    """One rank's line to the coordinator: ``launch/member.py`` within a process."""

    incarnation, heard_s, asked = 0, 0.0, int(Ask.NOTHING)

    def __init__(self, rank: int, world_size: int, coordinator: Coordinator):
        self.rank, self.world_size, self.store = rank, world_size, dist.HashStore()
        self._coordinator, self._known = coordinator, 0
        self._newer: dict[int, Callable[[], None]] = {}
        self._watcher: Host | None = None
        self.published: list[str] = []
        coordinator.hears.setdefault(rank, []).append(self._hear)

    def _hear(self) -> None:
        """A thread of the rank's own learns of it, some time later."""
        number = self._coordinator.newest.number

        def watch() -> None:
            self._known = max(self._known, number)
            for older in [one for one in self._newer if one < number]:
                self._newer.pop(older)()

        self._watcher = self._coordinator.machine.host(f"watcher {self.rank}", watch)

    def kill(self) -> None:
        if self._watcher is not None:
            self._watcher.killed = True

    # what steps and groups need
    def newer_than(self, number: int) -> bool:
        return self._known > number

    def on_newer(self, number: int, callback: Callable[[], None]) -> None:
        self._newer[number] = callback

    def forget(self, number: int) -> None:
        self._newer.pop(number, None)

    def with_all_routes(self, number: int, layout: Any) -> Any:
        return layout

    def on_offer(self, callback: Any) -> None: ...
    def decline(self, number: int, reason: str) -> None: ...
    def publish_observations(self, text: str) -> None:
        self.published.append(text)

    # recover.Control
    def next_generation(self, after: int, timeout_s: float | None = None) -> Generation:
        if self._coordinator.newest.number == after:
            self._coordinator.asked_again = True
        this_host().wait(lambda: self._coordinator.newest.number > after)
        self._known = max(self._known, self._coordinator.newest.number)
        newest = self._coordinator.newest
        if isinstance(newest, Stop):
            raise JobStopped(newest.why, newest.code)
        own = tuple(one for one in newest.plan.transfers if self.rank in (one.source, one.target))
        return replace(
            newest, plan=replace(newest.plan, transfers=own)
        )  # as it reads its part of a generation

    def take_offer(self, number: int) -> None: ...

    def report_live(self, number: int, done: int) -> None:
        if number == self._coordinator.state.generation:
            self._coordinator.report_live(self.rank, number, done)

    def finish(self, number: int, early: int = -1) -> None:
        def is_newer() -> bool:
            return self._coordinator.newest.number > number

        if not is_newer():  # else there is something to help with, or the job has been stopped
            self._coordinator.finished.add(self.rank)
        this_host().wait(lambda: self._coordinator.done or is_newer())
        if is_newer():
            raise Superseded("a rank died behind the last step")


class Journal:
    """What a rank writes down."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, name: str, **values: Any) -> None:
        self.events.append({"name": name, **values})

    def named(self, name: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["name"] == name]


class _Stopwatch:
    """Implements ``execute.timing.Stopwatch``: a second is a move of this job's machine."""

    device = DEVICE.type

    def __init__(self, device: Device):
        self._device = device

    def mark(self) -> dict[str, int]:
        at: dict[str, int] = {}

        def pass_by() -> bool:
            at["move"] = self._device.machine.moves
            return True

        self._device.main.give("mark", pass_by)
        return at

    now = mark

    def between_s(self, began: dict[str, int], ended: dict[str, int]) -> float:
        if "move" not in ended:
            self._device.synchronize("stopwatch")
        return float(ended["move"] - began["move"])


class Rank:
    """A process of the job, and its device."""

    def __init__(
        self,
        rank: int,
        case: Case,
        machine: Machine,
        coordinator: Coordinator,
        wires: dict[str, Wire],
        tables: dict[str, Table],
    ):
        self.rank, self._case, self._machine, self._coordinator = rank, case, machine, coordinator
        self.device: Device = machine.device(rank, one_queue=case.one_queue)
        self.memory = DeviceMemory(self.device)
        self._libraries = Library(machine, self.memory, wires), Hosts(machine, tables)
        self.member = Member(rank, len(case.ranks), coordinator)
        self.journal, self.model = Journal(), (Sliced if case.copies else Stack)(DEVICE.type)
        self.model.begins = self._begins
        self.weights: dict[int, torch.Tensor] = {}
        self.momenta: dict[tuple[int, Span], torch.Tensor] = {}
        """Of slices that are kept here."""
        self.syncs: list[list[str]] = []
        """Of each step that came to its agreement, what this host had waited for its device for by then."""
        self._before = 0
        self.host = machine.host(f"rank {rank}", self._main)

    def _main(self) -> None:
        with on_device(self.memory):
            runtime = RankRuntime(
                config=self._coordinator.config,
                member=self.member,  # type: ignore[arg-type]
                model=self.model,  # type: ignore[arg-type]
                build=self._build,
                tagged_messages=False,
                fault_point=self._point,
                journal=self.journal,  # type: ignore[arg-type]
                on_commit=lambda step, outcome: None,
                device=DEVICE.type,
                stopwatch=_Stopwatch(self.device),
            )
            recover.train(self.member, runtime, train_steps=self._case.steps)
            runtime.chronicle.log_last_step()
            self.weights = {layer: state[0].cpu() for layer, state in self.model.held.items()}
            if isinstance(self.model, Sliced):
                kept = {layer: states[0] for layer, states in self.model.states.items()}
                self.momenta = {
                    (layer, span): one.cpu() for layer, own in kept.items() for span, one in own.items()
                }

    def _build(self, number: int, named: Any) -> Any:
        devices, _ = self._libraries
        devices.before = lambda: self._point("connect", step=-1, generation=number)
        return build_groups(self.member, number, named, self._coordinator.config, self._libraries)

    def _begins(self) -> None:
        self._before = len(self.device.syncs)

    def _point(self, point: str, *, step: int, generation: int, microbatch: int = -1) -> None:
        if point == "agreement":
            self.syncs.append(self.device.syncs[self._before :])
        for kill in self._case.kills:
            if kill.rank == self.rank and kill.is_due(point, step, generation, microbatch):
                self.device.dead = self.host.killed = True
                self.member.kill()
                self._coordinator.dead.append(self.rank)
                raise Killed


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended."""

    case: Case
    ranks: list[Rank]
    wires: dict[str, Wire]

    @property
    def alive(self) -> list[Rank]:
        return [one for one in self.ranks if not one.device.dead]

    @property
    def losses(self) -> dict[int, float]:
        """By step, as those who said so saw them."""
        found: dict[int, float] = {}
        for one in self.ranks:
            found |= {event["step"]: event["loss"]["loss"] for event in one.journal.named("step_committed")}
        return found

    def connected(self, generation: int) -> set[str]:
        """The names of the groups that were connected for it."""
        parted = [name.split("/", 2) for name, wire in self.wires.items() if wire.connected]
        return {name for _, number, name in parted if int(number) == generation}

    def outlived(self) -> Counter[str]:
        """What became of the channels between living ranks at the first failure, and why."""
        again, living, found = self.connected(2), {one.rank for one in self.alive}, Counter[str]()
        for name in self.connected(1):
            if ">" in name and {*map(int, name.split(">"))} <= living:
                wire = next(one for one in self.wires.values() if one.name.endswith(f"/1/{name}"))
                quiet, given = zip(*wire.left.values(), strict=True)
                if name not in again:
                    found["kept"] += 1
                elif not all(quiet):
                    found[
                        "outstanding, " + ("as much on both ends" if len({*given}) == 1 else "on one end")
                    ] += 1
                else:
                    found["clean, and given unlike" if len({*given}) > 1 else "clean"] += 1
        return found

    def outcomes(self) -> list[str]:
        """How recoveries went on: ``resume``, ``redo`` or ``finish``."""
        return [event["outcome"] for event in self.alive[0].journal.named("recovered")]


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """torch knows one rank a process, and keeps groups by name. Here it is none of the job's, and the names differ; in
    the end they go.
    """
    world, dist.group.WORLD = dist.group.WORLD, dist.ProcessGroup(9_999, 10_000)
    register, known = c10d._register_pg_in_world, list[Any]()

    def named(group: Any, *, group_name: str, **others: Any) -> None:
        register(group, group_name=f"{group_name} {id(group)}", **others)
        known.append(group)

    c10d._register_pg_in_world = named
    try:
        yield
    finally:
        c10d._register_pg_in_world, dist.group.WORLD = register, world
        for group in known:
            c10d._cleanup_process_group_global_state(group)


def run(case: Case, seed: int) -> Ended:
    """Raises what a rank raised, and Deadlock, Race, OrdersDiffer, WrongPlace."""
    machine = Machine(seed)
    config = OdysseyConfig(device="cpu", **case.flags)
    coordinator = Coordinator(case, machine, config)
    wires: dict[str, Wire] = {}
    tables: dict[str, Table] = {}
    ranks = [Rank(rank, case, machine, coordinator, wires, tables) for rank in case.ranks]
    with torch.no_grad(), _one_process():
        machine.run()
    return Ended(case, ranks, wires)
