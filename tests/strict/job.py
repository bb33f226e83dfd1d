"""A job of several ranks in one process, on strict devices: the product's own runtime, recovery, groups and decisions.

The processes are of this file; what they hear of each other by is ``control.py``, who starts them again ``agent.py``.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from odyssey_megatron import recover
from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import EXIT_FENCED, ControlPlaneLost, Fenced, JobStopped
from odyssey_megatron.execute.rank import RankRuntime
from odyssey_megatron.launch.coordinator.reactions import JobState
from odyssey_megatron.launch.wire.control import observations_key
from odyssey_megatron.plan.placing.communicators import Needs, communicators
from odyssey_megatron.plan.placing.slices import Span
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import Generation
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.rebuild import groups, registry
from odyssey_megatron.rebuild import world as following
from odyssey_megatron.rebuild.groups import build_groups
from tests.execute.alone import MICROBATCHES
from tests.execute.model import Stack
from tests.execute.stack import job_of
from tests.strict.agent import Agent
from tests.strict.between_hosts import Hosts, Table
from tests.strict.communicators import Library, Wire
from tests.strict.control import Coordinator, Journal, member_of, taking_turns
from tests.strict.device import DEVICE, DeviceMemory, on_device
from tests.strict.machine import Device, Killed, Machine
from tests.strict.sliced import Sliced


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """``rank`` dies where its host comes by ``point`` of ``step``, -1: of any; by "connect" of any."""

    rank: int
    step: int
    point: str
    microbatch: int = -1
    generation: int = 0
    """0: any."""
    incarnation: int = 0
    leaves: bool = False
    """Its node was asked to leave: it goes by itself, behind the step."""
    breaks: bool = False
    """Its GPU has broken: whatever is started there dies."""

    def concerns(self, one: Rank) -> bool:
        return (one.rank, one.incarnation) == (self.rank, self.incarnation)

    def is_due(self, point: str, step: int, generation: int, microbatch: int) -> bool:
        return (
            point == self.point
            and (step == self.step or self.step < 0 or point == "connect")
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
    resident: int | None = None
    """Of each device, as ``one_queue``."""
    copies: int = 0
    """Of each slice of optimizer state; 0: every holder keeps all."""
    respawns: int = 0
    """How often each rank is started again; 0: what is left of its cell does not come back, either."""
    tensor: int = 1
    context: int = 1
    expert: int = 1
    """Experts of a layer, each on a rank of its own where gangs are whole."""
    tied: bool = False
    evaluates: bool = False
    """Behind each step, in two parts."""
    share: bool = False
    """The ranks share GPUs: all that goes between them goes between hosts, as with ``--odyssey-backend gloo``."""
    aim: Callable[[PolicyPlanner, JobState], Plan] | None = None
    """Where the job goes once it trains, though nobody has died."""

    @property
    def ranks(self) -> range:
        return range(self.stages * self.replicas * self.cell(0).size)

    def cell(self, rank: int) -> Cell:
        return Cell.of(rank, tensor=self.tensor, context=self.context, expert=self.expert)

    @property
    def config(self) -> OdysseyConfig:
        shrink = "auto" if self.respawns else "off"
        return OdysseyConfig(device="cpu", respawn=self.respawns, **{"shrink": shrink, **self.flags})

    @property
    def spec(self) -> JobSpec:
        return job_of(
            self.config,
            pipeline_model_parallel_size=self.stages,
            tensor_model_parallel_size=self.tensor,
            context_parallel_size=self.context,
            expert_model_parallel_size=self.expert,
            is_tied=self.tied,
            train_steps=self.steps,
            virtual_stages=self.virtual_stages,
            optimizer_copies=self.copies,
        )


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
    """A process of the job, and its device.

    Args:
        slot: which of its node's GPUs is its.
        incarnation: how many its rank has had before.
        size: number of ranks of the smaller cell that it is in; 0: of a whole one.
    """

    def __init__(self, rank: int, job: Job, *, slot: int, incarnation: int = 0, size: int = 0):
        self.rank, self.incarnation, self.slot, self._job, self._size = rank, incarnation, slot, job, size
        self.cell = job.case.cell(rank).smaller(size)
        case = job.case
        self.device: Device = job.machine.device(rank, one_queue=case.one_queue, resident=case.resident)
        self.memory = DeviceMemory(self.device)
        between_hosts = Hosts(job.machine, job.tables)
        devices = between_hosts if job.case.share else Library(job.machine, self.memory, job.wires)
        self._libraries = devices, between_hosts
        self.journal = Journal()
        kind = Sliced if case.copies else Stack
        self.model: Stack = kind(DEVICE.type, self.cell, tied=case.tied)
        self.model.begins, self.model.pinned = self._begins, self.memory.pin
        self.weights: dict[tuple[int, str], torch.Tensor] = {}
        """By layer and piece."""
        self.momenta: dict[tuple[int, Span, str], torch.Tensor] = {}
        """Of slices that are kept here, by piece."""
        self.syncs: list[list[str]] = []
        """Of each step that came to its agreement, what this host had waited for its device for by then."""
        self.evaluated: dict[int, float] = {}
        """Behind so many steps."""
        self.has: dict[int, int] = {}
        """By generation, how many communicators it has behind the last of its steps there, without those on offer."""
        self._before = 0
        self._runtime: Any = None
        self.member: Any = None
        self.host = job.machine.host(f"rank {rank}", self._main)

    @property
    def measured(self) -> str:
        """What it has published of that."""
        return self._job.coordinator.store.texts[observations_key(self.rank)]

    def _main(self) -> None:
        try:
            if self.slot in self._job.broken:
                self.die()
            self._train()
        except Fenced:
            self._end(EXIT_FENCED)
        except (JobStopped, ControlPlaneLost) as end:
            if not self.member.joins or getattr(end, "exit_code", 0):
                raise  # else the others were through before it had joined

    def _train(self) -> None:
        case, coordinator = self._job.case, self._job.coordinator
        self.member = member_of(self.rank, len(case.ranks), self.incarnation, self._size, coordinator)
        with on_device(self.memory):
            if self.member.joins:
                if self.cell.full > 1:
                    self.member.company.meet(self.cell)
                self.member.join()
            self._runtime = runtime = RankRuntime(
                config=coordinator.config,
                member=self.member,
                model=self.model,  # type: ignore[arg-type]
                build=self._build,
                tagged_messages=case.share,
                fault_point=self._point,
                journal=self.journal,  # type: ignore[arg-type]
                on_commit=lambda step, outcome: None,
                on_groups=self.model.enter,
                cell=self.cell,
                device=DEVICE.type,
                stopwatch=_Stopwatch(self.device),
            )
            recover.train(self.member, runtime, train_steps=case.steps, after_step=self._after_step)
            runtime.chronicle.log_last_step()
            layers = self.model.current if isinstance(self.model, Sliced) else self.model.held
            self.weights = {
                (layer, name): piece[0].cpu()
                for layer in layers
                for name, piece in self.model.held[layer].items()
            }
            if isinstance(self.model, Sliced):
                self.momenta = {
                    (layer, span, name): one.cpu()
                    for layer in self.model.states.keys() & layers
                    for span, pieces in self.model.states[layer][0].items()
                    for name, one in pieces.items()
                }

    def _after_step(self, recovery: recover.Recovery) -> None:
        number, on_offer = self._runtime.generation, f"groups/{self._runtime.generation + 1}/"
        own = [
            wire.name
            for wire in self._job.wires.values()
            for end in wire.ends.values()
            if wire.connected and end.memory is self.memory and not end.aborted
        ]
        self.has[number] = sum(not name.startswith(on_offer) for name in own)
        if not self._job.case.evaluates:
            return

        def work(world: Any) -> float:
            total, count, part = 0.0, 0.0, MICROBATCHES // 2 + 1
            for first, microbatches in ((0, part), (part, MICROBATCHES - part)):
                self._runtime.training.evaluate(first, microbatches)
                totals = self.model.local_totals().cpu()
                dist.all_reduce(totals, group=world)
                total, count = total + float(totals[0]), count + float(totals[1])
            return total / count

        self.evaluated[self._runtime.committed] = recovery.together(work)

    def _build(self, number: int, named: Any, before: Any) -> Any:
        devices, _ = self._libraries
        devices.before = lambda: self._point("connect", step=-1, generation=number)
        return build_groups(self.member, number, named, self._job.coordinator.config, self._libraries, before)

    def _begins(self) -> None:
        self._before = len(self.device.syncs)

    def _point(self, point: str, *, step: int, generation: int, microbatch: int = -1) -> None:
        if point == "agreement":
            self.syncs.append(self.device.syncs[self._before :])
        for kill in self._job.case.kills:
            if kill.concerns(self) and kill.is_due(point, step, generation, microbatch):
                self._job.struck.add((kill, self.incarnation))
                if kill.leaves:
                    self.member.liveness._heartbeat.asked = Ask.LEAVE
                    continue
                if kill.breaks:
                    self._job.broken.add(self.slot)
                self.die()

    def die(self) -> NoReturn:
        """Called by a host of its own."""
        self.kill()
        raise Killed

    def kill(self) -> None:
        self._end(-9)

    def _end(self, code: int) -> None:
        self.device.dead = True
        self.host.kill_process()
        self._job.agent.ended(self.rank, self.slot, code)


class Job:
    """All processes of a case, on one machine."""

    def __init__(self, case: Case, seed: int):
        self.case, self.machine = case, Machine(seed)
        self.coordinator = Coordinator(
            case.spec, len(case.ranks), case.profile, self.machine, case.config, case.aim
        )
        self.wires: dict[str, Wire] = {}
        self.tables: dict[str, Table] = {}
        self.struck: set[tuple[Kill, int]] = set()
        """The kills that have come, with the incarnation of whom they have met."""
        self.broken: set[int] = set()
        """Slots whose GPU has broken."""
        self.agent = Agent(self.coordinator, len(case.ranks), start=self._start, vacate=self._vacate)
        self.ranks = [Rank(rank, self, slot=rank) for rank in case.ranks]
        self.machine.host("agent", self.agent.run, may_be_left=True)

    def _start(self, rank: int, slot: int, incarnation: int, size: int) -> None:
        self.ranks.append(Rank(rank, self, slot=slot, incarnation=incarnation, size=size))

    def _vacate(self, slot: int) -> None:
        for one in self.ranks:
            if one.slot == slot and not one.device.dead:
                one.kill()


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended."""

    case: Case
    ranks: list[Rank]
    """All processes, also those that came later."""
    wires: dict[str, Wire]
    generations: list[Generation]
    struck: set[tuple[Kill, int]]

    @property
    def entered(self) -> list[Generation]:
        """Those that a step was committed in."""
        numbers = {event["generation"] for one in self.ranks for event in one.journal.named("step_committed")}
        return [one for one in self.generations if one.number in numbers]

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

    @property
    def evaluated(self) -> dict[int, float]:
        """Behind so many steps, as those who say it have found together. Who died may have said it before the others
        summed it once more, in another order.
        """
        found: dict[int, float] = {}
        for one in sorted(self.ranks, key=lambda one: one.device.dead):
            for steps, loss in one.evaluated.items():
                known = found.setdefault(steps, loss)
                assert known == loss or (one.device.dead and math.isclose(known, loss, rel_tol=1e-15))
        return found

    def connected(self, generation: int) -> set[str]:
        """The names of the groups that were connected for it."""
        parted = [name.split("/", 2) for name, wire in self.wires.items() if wire.connected]
        return {name for _, number, name in parted if int(number) == generation}

    def anew(self, generation: int) -> Counter[int]:
        """Rank -> how many communicators it has connected for that one."""
        names = {f"groups/{generation}/{name}" for name in self.connected(generation)}
        ends = [end for name in names for end in self.wires[name].ends.values()]
        return Counter(end.memory.device.rank for end in ends)

    def told_anew(self, number: int, before: int = 0) -> tuple[int, int]:
        """For generation ``number``, how many the rank that has connected most has connected, and how many
        ``plan/placing/communicators.py`` says that it does behind that of number ``before``; 0: none.
        """
        after, previous = (
            next(
                (
                    Needs(it.plan.layout, it.plan.transfers, it.planned)
                    for it in self.generations
                    if it.number == one
                ),
                None,
            )
            for one in (number, before)
        )
        assert after is not None
        told = communicators(after, self.case.cell(0), previous)
        return max(self.anew(number).values(), default=0), told.anew

    @property
    def all_told_lasting(self) -> dict[int, tuple[int, int]]:
        """For each generation that steps were committed in, how many communicators a rank has behind them at most, and
        how many ``plan/placing/communicators.py`` says that it has.
        """
        cell = self.case.cell(0)
        return {
            one.number: (
                max(rank.has.get(one.number, 0) for rank in self.ranks),
                communicators(Needs(one.plan.layout), cell).count,
            )
            for one in self.entered
        }

    @property
    def all_told_anew(self) -> dict[int, tuple[int, int]]:
        """Of the first generation, and of each that began between two steps."""
        numbers = [one.number for one in self.entered if one.planned]
        return {1: self.told_anew(1)} | {one: self.told_anew(one, one - 1) for one in numbers}

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
def one_process() -> Iterator[None]:
    """torch knows one rank a process, and keeps groups by name. Here it is none of the job's, and the names differ; in
    the end they go. Within its collectives tensors are still where they are: it would take a device of Python's for a
    tensor of another library's, and leave it outside.
    """
    world, dist.group.WORLD = dist.group.WORLD, dist.ProcessGroup(9_999, 10_000)
    register, known = registry.register, list[Any]()

    def named(group: Any, name: str, **others: Any) -> None:
        register(group, f"{name} {id(group)}", **others)
        known.append(group)

    foreign = c10d.has_torch_function
    groups.register = following.register = named
    c10d.has_torch_function = lambda tensors: False
    try:
        yield
    finally:
        groups.register = following.register = register
        c10d.has_torch_function, dist.group.WORLD = foreign, world
        for group in known:
            c10d._cleanup_process_group_global_state(group)


def run(case: Case, seed: int) -> Ended:
    """Raises what a rank raised, and Deadlock, Race, OrdersDiffer, WrongPlace."""
    job = Job(case, seed)
    with torch.no_grad(), one_process(), taking_turns(job.machine, job.coordinator.store):
        job.machine.run()
    return Ended(case, job.ranks, job.wires, job.coordinator.generations, job.struck)
