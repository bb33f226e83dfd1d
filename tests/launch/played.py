"""A job whose ranks are played by the test: what is real of it is the coordinator, and its store."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from odyssey_megatron.cluster.events import (
    STARTS_OF_AN_AGENT,
    GenerationLive,
    RankDied,
    RankFinished,
    RankJoined,
)
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import LEASE_S, OdysseyConfig
from odyssey_megatron.launch.coordinator.coordinator import Coordinator
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire import generations
from odyssey_megatron.launch.wire.control import Control, EventReader
from odyssey_megatron.launch.wire.local_rendezvous import LocalRendezvous
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.plan import Plan, Transfer
from odyssey_megatron.plan.scheduling.programs import Programs
from odyssey_megatron.plan.sending.generation import Message
from odyssey_megatron.policy.decided import Decided
from tests.launch.toy import posted_job

PLAN = Plan(
    policy="initial",
    layout=Layout(holders=((0, 1, 2, 3),), routes=()),
    programs=Programs.from_text("0: STEP"),
    transfers=(),
    step_s=1.0,
    bound_s=1.0,
    transition_s=0.0,
    peak_bytes=(),
)


class FakePlanner:
    """Counts: the n-th decision's plan has n as its step time."""

    def __init__(self) -> None:
        self.previous: list[Plan] = []
        self.learned: list[tuple[Plan, tuple[str, ...]]] = []
        self.rehearsed: list[Plan] = []
        self.adopted: list[tuple[str, ...]] = []
        self.error: Exception | None = None
        self.target: Plan | None = None
        self.start_error: Exception | None = None

    def start(self, job, state, profile_json):
        if self.start_error:
            raise self.start_error
        return Decided(plan=PLAN, rows=())

    def learn(self, state, current, observations, now_s):
        self.learned.append((current, tuple(observations)))

    def rehearse(self, state, current, now_s):
        self.rehearsed.append(current)

    def adopt(self, observations):
        self.adopted.append(tuple(observations))

    def decide(self, state, previous, now_s):
        self.previous.append(previous)
        if self.error:
            raise self.error
        source = min({*state.alive} - state.fresh)
        plan = replace(
            PLAN,
            policy="replan",
            step_s=1.0 + len(self.previous),
            layout=Layout(holders=(tuple(state.alive),), routes=()),
            transfers=tuple(
                Transfer(layer=0, source=source, target=one) for one in state.alive if one != source
            ),
        )
        return Decided(plan=plan, rows=(), target=self.target and (lambda: self.target))

    def towards(self, state, current, target):
        return target

    def keep(self):
        pass

    def finish(self, observations):
        self.finished = True


class Job:
    """Four ranks on two nodes, played by the test."""

    def __init__(self, folder, mode="off"):
        self.rendezvous = LocalRendezvous("test")
        self.control, self.planner, self.said = self.connect(), FakePlanner(), []
        self.config = OdysseyConfig(mode=mode, device="cpu", node_lease_s=LEASE_S.low, run_dir=str(folder))
        self.control.put(keys.lease_key(1), "0")
        self.coordinator = Coordinator(
            control=self.connect(),
            events=EventReader(self.connect()),
            config=self.config,
            nodes={0: 0, 1: 0, 2: 1, 3: 1},
            planner=self.planner,
            journal=Journal(folder, source="agent0"),
            say=self.said.append,
        )
        self.verdict = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.beating = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()
        self.thread.start()

    def connect(self) -> Control:
        address = self.rendezvous.next_rendezvous().bootstrap_store_info
        return Control.connect(address.master_addr, address.master_port, "token", timeout_s=60.0)

    def _run(self):
        self.verdict = self.coordinator.run()

    def _beat(self):
        control, beat = self.connect(), 0
        while not self.beating.wait(0.05):
            beat += 1
            control.put(keys.lease_key(1), str(beat))

    def post(self, *, measured=True):
        job, profile = posted_job(pipeline=2, steps=3)
        self.control.put(keys.JOB, to_json({"job": to_json(job), "profile": profile}))
        self.publish("seen by {}" if measured else "")
        for rank in range(4):
            self.control.put(keys.digest_key(rank), "digest")

    def publish(self, text):
        for rank in range(4):
            self.control.put(keys.observations_key(rank), text.format(rank))

    def send(self, *events):
        for event in events:
            self.control.send(event, acknowledged=True)

    def live(self, number, *ranks, done=0):
        self.send(*(GenerationLive(ranks=(rank,), generation=number, done=done) for rank in ranks))

    def died(self, *ranks, code=-9, incarnation=0):
        self.send(
            *(RankDied(rank=rank, code=code, cause="killed", incarnation=incarnation) for rank in ranks)
        )

    def finished(self, number, *ranks):
        self.send(*(RankFinished(rank=rank, generation=number) for rank in ranks))

    def joins(self, *ranks, node=0, incarnation=1):
        self.send(*(RankJoined(rank=rank, node=node, incarnation=incarnation) for rank in ranks))

    def offer(self, number) -> Message:
        text = self.control.get(keys.generation_key(number), timeout_s=5)
        assert text.startswith(keys.OFFER)
        return self.read(text.removeprefix(keys.OFFER))

    def generation(self, number) -> Message:
        text = self.control.get(keys.generation_key(number), timeout_s=5)
        return self.read(text.removeprefix(keys.AGAIN))

    def read(self, text) -> Message:
        """As rank 0 does."""
        found = generations.read(text, 0, self.control)
        assert found is not None
        return found

    def absent(self, number) -> bool:
        time.sleep(0.15)
        return self.control.peek(keys.generation_key(number)) is None

    def close(self):
        """A coordinator that went on would be in the way of the tests behind this one."""
        self.beating.set()
        if self.thread.is_alive():
            for incarnation in (0, 1, STARTS_OF_AN_AGENT):
                self.died(0, 1, 2, 3, incarnation=incarnation)
            self.thread.join(5)

    def end(self):
        self.thread.join(5)
        assert not self.thread.is_alive()
        return self.verdict
