"""The control plane of a job in one process: the product's own members, reactions, planner and offers.

Of this file are the store, the coordinator's shell, and the threads of members, which take turns with all other hosts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from odyssey_megatron.cluster.events import Ask, Event
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import initial_state, without_fresh
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ControlPlaneLost, LayersLost, OdysseyError
from odyssey_megatron.execute import prepare
from odyssey_megatron.launch.coordinator import reactions
from odyssey_megatron.launch.coordinator.offers import Offers
from odyssey_megatron.launch.coordinator.reactions import Answer, Forget, JobState, Recover, Withdraw
from odyssey_megatron.launch.coordinator.rebalancing import Rebalancing
from odyssey_megatron.launch.coordinator.replacing import Replacing
from odyssey_megatron.launch.rank import company, member, watch
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire import generations
from odyssey_megatron.launch.wire.verdict import JobVerdict
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.sending.generation import Finished, Generation, Stop
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.planner import PolicyPlanner
from tests.strict.machine import Host, Machine, this_host

_TURNS = 1000
"""Of a host that waits with a limit, until that is over: others may be a hundred times slower."""


class Journal:
    """What a process writes down."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, name: str, **values: Any) -> None:
        self.events.append({"name": name, **values})

    def named(self, name: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["name"] == name]


class Store:
    """``launch/wire/control.py`` of all processes, which cannot lose it."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._deleted: set[str] = set()
        self.events: list[Event] = []
        self.idle = True
        """The coordinator has nothing to do."""
        self.over = False
        """It has left."""
        self.changes = 0
        self.store = dist.HashStore()

    def put(self, key: str, text: str) -> None:
        self.put_all({key: text})

    def put_all(self, texts: dict[str, str]) -> None:
        self.texts |= texts
        self._deleted -= texts.keys()
        self.changes += 1

    def has(self, names: Iterable[str]) -> bool:
        return set(names) <= self.texts.keys()

    def read(self, names: Iterable[str]) -> list[str]:
        return [self.texts[name] for name in names]

    def get(self, key: str, *, timeout_s: float | None = None) -> str:
        this_host().wait(lambda: key in self.texts or key in self._deleted)
        return self.texts[key]

    def peek(self, key: str) -> str | None:
        return self.texts.get(key)

    def forget(self, key: str) -> None:
        self.texts.pop(key, None)
        self._deleted.add(key)

    forget_before = keys.Control.forget_before

    def of_generations(self) -> list[tuple[int, str]]:
        found = [keys._OF_GENERATION.fullmatch(key) for key in self.texts]
        return [(int(one[1]), one[0]) for one in found if one]

    def count(self, key: str) -> int:
        self.put(key, str(int(self.texts.get(key, "0")) + 1))
        return int(self.texts[key])

    def wait(self, names: list[str], timeout_s: float | None = None) -> None:
        if timeout_s is None:
            this_host().wait(lambda: self.over or self.has(names))
        for _ in range(_TURNS * (timeout_s is not None)):
            if self.has(names):
                break
            this_host().wait()  # time passes, whatever the others do
        if not self.has(names):
            raise ControlPlaneLost("the job has ended") if timeout_s is None else TimeoutError

    def send(self, event: Event, *, acknowledged: bool = False) -> None:
        self.events.append(event)
        self.idle = False


class Coordinator:
    """``launch/coordinator/coordinator.py``, which hears of what happens whenever the machine lets it.

    Args:
        aim: where the job is to go once it trains, from the plan it starts with.
    """

    def __init__(
        self,
        spec: JobSpec,
        ranks: int,
        profile: Profile,
        machine: Machine,
        config: OdysseyConfig,
        aim: Callable[[PolicyPlanner, JobState], Plan] | None = None,
    ):
        self.store, self.config, self.journal = Store(), config, Journal()
        self._planner = PolicyPlanner(config)
        nodes = tuple(0 for _ in range(ranks))
        cluster = initial_state(nodes=nodes, **spec.cells)
        self.store.put(keys.JOB, to_json({"job": to_json(spec), "profile": to_json(profile)}))
        self._offers = Offers(
            self._planner,
            Rebalancing(self._planner, self.journal, lambda text: None, acts=False),  # type: ignore[arg-type]
            Replacing(self._planner, self.journal, lambda text: None, acts=False, restarts=False),  # type: ignore[arg-type]
        )
        start = self._planner.start(spec, cluster, to_json(profile)).plan
        self.job = JobState(cluster=cluster, nodes=nodes, start_plan=start)
        if aim is not None:
            self._offers.aim(partial(aim, self._planner, self.job))
        self.generations: list[Generation] = []
        machine.host("coordinator", self._run)

    def _run(self) -> None:
        assert self.job.start_plan is not None
        self._publish(reactions.published(self.job, self.job.start_plan, "start"))
        while not self.store.over:
            this_host().wait(lambda: bool(self.store.events))
            events, self.store.events = self.store.events, []
            self.job, actions = reactions.react(self.job, events, now_s=1.0)
            for action in actions:
                self._do(action)
            if not self.store.over:
                self._offer()
            self.store.idle = not self.store.events

    def _do(self, action: reactions.Action) -> None:
        match action:
            case Answer(joined=joined, newest=newest):
                told = keys.NOT_WELCOME if newest is None else str(newest)
                self.store.put(keys.welcome_key(joined.rank, joined.incarnation), told)
            case Forget(number=number):
                self.store.forget_before(number)
            case Withdraw(number=number, after=after):
                generations.withdraw(number, after, self.store)  # type: ignore[arg-type]
            case Recover():
                self._recover(action)
            case Stop() | Finished():
                self._end(action)
            case JobVerdict(code=code, why=why):
                self._end(reactions.stop(self.job, why, code))

    def _recover(self, wanted: Recover) -> None:
        known = self.job.known_plan
        assert known is not None
        try:
            decided = self._planner.decide(without_fresh(self.job.cluster), known, 1.0)
        except LayersLost as error:
            return self._end(reactions.layers_lost(self.job, error))
        self._offers.aim(decided.target)
        plan = decided.plan
        if self.job.live_plan is None:  # nobody has trained yet, and all make their layers
            plan = replace(plan, transfers=(), transition_s=0.0)
        self._publish(reactions.published(self.job, plan, wanted.why, dead=wanted.dead))

    def _offer(self) -> None:
        try:
            self.job, proposal = self._offers.following(self.job, None, 1.0)
        except OdysseyError as error:
            raise AssertionError(f"the coordinator would have failed: {error}") from error
        if proposal is not None:
            self._publish(
                reactions.offered(
                    self.job, proposal.plan, proposal.why, decide_s=0.0, leaving=proposal.leaving
                )
            )

    def _publish(self, made: tuple[JobState, Generation]) -> None:
        self.job, generation = made
        self.generations.append(generation)
        generations.send(generation, self.job.cluster.cell_size, self.store)  # type: ignore[arg-type]

    def _end(self, message: Stop | Finished) -> None:
        generations.send(message, self.job.cluster.cell_size, self.store)  # type: ignore[arg-type]
        self.store.over = True
        self.store.put(keys.VERDICT, "")


def member_of(rank: int, ranks: int, incarnation: int, size: int, coordinator: Coordinator) -> member.Member:
    """A process's line to the coordinator. Called by a host of that process."""
    store: Any = coordinator.store
    heartbeat: Any = SimpleNamespace(asked=Ask.NOTHING)
    return member.Member(
        rank=rank,
        world_size=ranks,
        control=store,
        watch=store,
        config=coordinator.config,
        incarnation=incarnation,
        size=size,
        heartbeat=heartbeat,
    )


@contextlib.contextmanager
def taking_turns(machine: Machine, store: Store) -> Iterator[None]:
    """In the body threads that the product starts are hosts of ``machine``."""

    class Condition:
        def __init__(self) -> None:
            self._within: Host | None = None

        def __enter__(self) -> None:
            if self._within is not None:
                this_host().wait(lambda: self._within is None)
            self._within = this_host()

        def __exit__(self, *error: object) -> None:
            self._within = None

        def wait_for(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
            soon, self._within = timeout_s is not None and timeout_s <= 0.5, None
            this_host().wait(lambda: self._within is None and (until() or (soon and store.idle)))
            self._within = this_host()
            return until()

        def notify_all(self) -> None: ...

    class Event:
        def __init__(self) -> None:
            self._is_set = False

        def set(self) -> None:
            self._is_set = True

        def wait(self) -> None:
            this_host().wait(lambda: self._is_set)

    class Thread:
        def __init__(self, *, target: Callable[..., None], args: Any = (), name: str, daemon: bool):
            self._main, self._name = partial(target, *args), name

        def start(self) -> None:
            machine.thread(self._name, self._main)

    def sleep(seconds: float) -> None:
        """Until there is something new to look at."""
        seen = store.changes
        this_host().wait(lambda: store.changes != seen)

    threads = SimpleNamespace(
        Condition=Condition, Event=Event, Thread=Thread, Lock=contextlib.nullcontext, Semaphore=None
    )
    with (
        mock.patch.object(watch, "threading", threads),
        mock.patch.object(prepare, "threading", threads),
        mock.patch.object(company, "threading", threads),
        mock.patch.object(company, "time", SimpleNamespace(sleep=sleep)),
        mock.patch.object(member, "atexit", SimpleNamespace(register=lambda function: None)),
    ):
        yield
