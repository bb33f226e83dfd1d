"""The ranks of a job, played by one process, as far as a coordinator hears of them (``planner.py``)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

from odyssey_megatron.cluster.events import GenerationLive, RankDied, RankJoined
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import to_json
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.plan.layout import Layout, megatron_layout
from odyssey_megatron.plan.placing.memory import fullest_bytes
from odyssey_megatron.plan.placing.redundancy import with_keepers
from odyssey_megatron.plan.sending.generation import Generation
from odyssey_megatron.policy.costs.measured import LinkTimes, Measured
from odyssey_megatron.policy.costs.profile import Observation, Profile
from tests.plan.samples import preset_profile

GPUS_A_NODE = 8
MOST_S = 900.0
"""To work out what decisions look up, or to decide."""
TIGHT = 1.05
"""Times the memory that 1F1B's fullest worker needs, with messages that are kept, where memory binds."""


def job_of(
    model: str, gpus: int, tp: int, pp: int, copies: int, *, is_tight: bool = False
) -> tuple[JobSpec, Profile]:
    microbatches = gpus // tp * 2
    profile = preset_profile(model, "h100", tensor_parallel_size=tp)
    if is_tight:
        layout = megatron_layout(
            num_layers=len(profile.costs.layers),
            pipeline_size=pp,
            num_workers=gpus // tp,
            num_microbatches=microbatches,
        )
        layout = with_keepers(layout, None, {one: one // GPUS_A_NODE for one in layout.workers}, copies)
        needs = fullest_bytes(layout, replace(profile.costs, keeps_messages=True))
        profile = replace(profile, costs=replace(profile.costs, memory_bytes=int(TIGHT * needs)))
    job = JobSpec(
        num_layers=len(profile.costs.layers),
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=tp,
        num_microbatches=microbatches,
        tokens_per_step=4096 * microbatches,
        train_steps=1,
        optimizer_copies=copies,
    )
    return job, profile


NUMBERS: dict[int | str, int | str] = {"again": 2, "slow": 2, "link": 1, "smaller": 2}
"""Workers that the incident of a name is about, if that is a number."""


class Ranks:
    """All ranks of a job, as far as the coordinator hears of them."""

    def __init__(self, job: JobSpec, profile: Profile, control: Control, gpus: int):
        self.job, self.profile, self.control, self.gpus = job, profile, control, gpus
        self.random = random.Random(1)
        layout = megatron_layout(
            num_layers=job.num_layers,
            pipeline_size=job.pipeline_model_parallel_size,
            num_workers=gpus // job.tensor_model_parallel_size,
            num_microbatches=job.num_microbatches,
        )
        self.spans = {hop.worker: (hop.first, hop.last) for route in layout.routes for hop in route.hops}
        one, other, *_ = (hop.worker for hop in layout.routes[0].hops)
        self.a_link = one, other

    def noisy(self, value: float) -> float:
        return value * self.random.uniform(0.98, 1.02)

    def measured(self, rank: int) -> Measured:
        costs = self.profile.costs
        first, last = self.spans[rank // self.job.tensor_model_parallel_size]
        layers = costs.layers[first:last]
        span = Observation(
            first=first,
            last=last,
            samples=10,
            forward_s=self.noisy(sum(one.forward_s for one in layers)),
            input_grad_s=self.noisy(sum(one.input_grad_s for one in layers)),
            weight_grad_s=self.noisy(sum(one.weight_grad_s for one in layers)),
        )
        link = LinkTimes(
            worker=-1,
            message_bytes=costs.message_bytes,
            empty_s=self.noisy(costs.link_latency_s),
            message_s=self.noisy(costs.message_s()),
        )
        held = tuple((first + at, one.state_bytes) for at, one in enumerate(layers))
        return Measured(spans=(span,), link=link, state_bytes=held)

    def publish(self) -> None:
        texts = {keys.observations_key(rank): to_json(self.measured(rank)) for rank in range(self.gpus)}
        self.control.put_all(texts)

    def start(self) -> None:
        control = self.control
        control.put(keys.JOB, to_json({"job": to_json(self.job), "profile": to_json(self.profile)}))
        for rank in range(self.gpus):
            control.put(keys.observations_key(rank), "")
            control.put(keys.digest_key(rank), "the same")
        control.wait([keys.generation_key(1)], 300)
        self.publish()
        for rank in range(self.gpus):
            control.send(GenerationLive(ranks=(rank,), generation=1))
        while control.store.queue_len(keys.EVENTS):
            time.sleep(0.01)

    def die(self, workers: list[int]) -> None:
        size = self.job.tensor_model_parallel_size
        for worker in workers:
            self.control.send(RankDied(rank=worker * size, code=-9, cause="killed", t_s=0.0))

    def come_back_smaller(self, worker: int, generation: Callable[[int], Generation]) -> None:
        """Let ``worker`` die and come back with half of its ranks, until all have entered a ``generation``
        that knows of it.
        """
        size = self.job.tensor_model_parallel_size
        ranks = range(worker * size, (worker + 1) * size)
        others, back = [rank for rank in range(self.gpus) if rank not in ranks], ranks[: size // 2]
        self.die([worker])
        self.control.wait([keys.generation_key(2)], MOST_S)
        self._enter(2, others)
        for rank in back:
            joined = RankJoined(rank=rank, node=rank // GPUS_A_NODE, incarnation=1, size=len(back))
            self.control.send(joined)
        number, found = 2, generation(2)
        while not found.shapes:
            number += 1
            self.control.wait([keys.generation_key(number)], MOST_S)
            found = generation(number)
            self._enter(number, list(found.members))

    def _enter(self, number: int, ranks: list[int]) -> None:
        for rank in ranks:
            self.control.send(GenerationLive(ranks=(rank,), generation=number))
        while self.control.store.queue_len(keys.EVENTS):
            time.sleep(0.01)

    def lose_one(self, workers: list[int]) -> None:
        """Let the first of ``workers`` die, and take it out."""
        self.die([workers.pop(0)])
        self.control.wait([keys.generation_key(2)], MOST_S)


def lost_workers(layout: Layout, dead: int | str, repeat: int) -> list[int]:
    """Over pipelines and stages, such that some owner of each slice of state is left; of a node, one GPU each."""
    workers, found = layout.workers, set[int]()
    dead = NUMBERS.get(dead, dead)
    if dead == "node":
        first = (repeat * 3 + 1) * GPUS_A_NODE % len(workers)
        return list(range(first, first + GPUS_A_NODE))
    owners = [one for kind in set(layout.owners) for one in kind]
    for at in range(len(workers)):  # coprime steps
        one = workers[(3 + repeat * 7 + at * 37) % len(workers)]
        if len(found) < int(dead) and not any(
            found.issuperset({*kind} - {one}) for kind in owners if one in kind
        ):
            found.add(one)
    assert len(found) == dead, f"only {len(found)} of {dead} workers can be lost"
    return sorted(found)
