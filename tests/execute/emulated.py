"""A rank with an emulated accelerator: everything real but the compute, which is a sleep.

Run by ``odyssey run``: launcher, coordinator, groups, interpreter, messages, agreement and recovery are the
product's. Each message says who sends it, and when its accelerator is done, on the machine's monotonic clock. An
instruction is done at max(own accelerator, sender + link) + its cost / the worker's speed, and the rank sleeps until
then. So a rank that was late, because a hundred processes share two cores, does not make the next one late as long as
it is late by less than an instruction takes; what remains is what the schedule, the messages and their order make of
the costs, carried out by many processes that know only their own part.

Where the run folder has a table of what things really take (``emulation.Truth``), those are its times, with noise, and
the ranks measure and publish them by the product's own way: a layer's time as the accelerator was busy, a link's by
ping-pong. The planner has nothing but these.

Two times of each step are journalled in place of losses: ``modelled_s`` by these deadlines, and ``late_s``, how far
behind its deadline the latest instruction ended on any rank; the runtime itself times the step by the wall clock.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from odyssey_megatron import recover
from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig, add_arguments, config_from
from odyssey_megatron.errors import EXIT_FENCED, Fenced, JobStopped
from odyssey_megatron.execute import rank as product_rank
from odyssey_megatron.execute import timing
from odyssey_megatron.execute.interpreter import Needs
from odyssey_megatron.execute.neighbours import Exchanged, Neighbours
from odyssey_megatron.execute.rank import RankRuntime
from odyssey_megatron.execute.reduction import Summands
from odyssey_megatron.launch.rank.environment import journal_of
from odyssey_megatron.launch.rank.injector import Injector
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.plan.checking.simulate import reduce_s
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.slices import EVERYTHING, Span, bytes_of, firsts
from odyssey_megatron.plan.scheduling.gathers import gather_order, gather_s
from odyssey_megatron.plan.scheduling.reductions import buckets
from odyssey_megatron.policy.costs.measured import HeldSeen, LinkTimes
from odyssey_megatron.rebuild.groups import build_groups, init_default_group
from tests.execute.emulation import Emulation, Truth, load_emulation, load_truth
from tests.execute.held import Held, Outcome


class Accelerator(Held):
    """Implements ``execute.parts.Model``. A layer's state counts the steps that it was updated in."""

    def __init__(
        self, emulation: Emulation, truth: Truth | None, rank: int, world_size: int, cell: Cell | None = None
    ):
        self.num_totals = 2 * world_size  # of each rank: when it is done, and its greatest lateness
        super().__init__()
        self._cell = cell or Cell(rank=rank)
        self._costs, self._tokens = emulation.profile.costs, emulation.job.tokens_per_step
        self._times = truth.costs if truth else self._costs
        self._truth, self._rng = truth, random.Random(rank)
        self.bytes_of_a_message = self._times.message_bytes
        self.busy_s = 0.0
        """So long this accelerator has computed."""
        self._microbatches = emulation.job.num_microbatches
        self._speed = self._first_speed = dict(emulation.speeds).get(rank, 1.0) / self._cell.each
        self._slowed = {step: speed for who, speed, step in emulation.slowed if who == rank}
        self._slowed_links = [one for one in emulation.slowed_links if rank in one[:2]]
        self._rank, self._world_size, self._seamless = rank, world_size, emulation.seamless
        self._fused, self._megatron_start = False, emulation.megatron_start
        self._copies = 0
        self._workers: dict[tuple[int, int], int] = {}
        self._mine: tuple[int, ...] = ()
        self._kept_bytes = 0
        self._done_s, self._fresh = 0.0, True
        self._began_s = self._late_s = 0.0
        self._step = 0
        self._heads: list[int] = []
        self._sums: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """By the layers that are summed, in their order, and by part."""
        self._layer_bytes = emulation.layer_bytes
        self._stepped: dict[int, dict[Span, torch.Tensor]] = {}
        """Of layers whose state is cut, for each slice when its first owner had stepped it: its weights."""
        self._own_slices: list[torch.Tensor] = []
        self._buckets: dict[tuple[int, int], int] = {}
        """What is summed at once, and gathered, in the order in which it is gathered, and how many hold it."""
        self._arrives_s: dict[tuple[int, int], float] = {}
        """When the weights of each are here, as far as that is known."""

    # -- time -------------------------------------------------------------------------------------------------------

    def _until(self, done_s: float) -> None:
        self._done_s = done_s
        time.sleep(max(0.0, done_s - time.monotonic()))
        self._late_s = max(self._late_s, time.monotonic() - done_s)

    def _compute(
        self,
        kinds: tuple[str, ...],
        first: int,
        last: int,
        message: torch.Tensor | None,
        weights_s: float = 0.0,
    ) -> torch.Tensor:
        seconds = sum(getattr(layer, kind) for layer in self._times.layers[first:last] for kind in kinds)
        seconds *= self._more_or_less() / self._speed
        ready_s = 0.0
        if message is not None:
            done_s, sender = message.tolist()
            ready_s = done_s + self.message_s((int(sender), self._rank))
        self.busy_s += seconds
        self._until(max(self._done_s, ready_s, weights_s) + seconds)
        return torch.tensor([self._done_s, self._rank], dtype=torch.float64)

    def _more_or_less(self) -> float:
        noise = self._truth.noise if self._truth else 0.0
        return 1.0 + self._rng.uniform(-noise, noise)

    def message_s(self, link: tuple[int, int] | None = None, share: float = 1.0) -> float:
        """Of one message on its way, or of one with this share of its bytes. ``link``: None is one that is not slow."""
        transfer_s = share * self._times.message_bytes / self._times.link_bytes_per_s
        slow = [
            factor for *of, factor, step in self._slowed_links if tuple(of) == link and step <= self._step
        ]
        factor = slow[-1] if slow else 1.0
        return (self._times.link_latency_s + transfer_s) * factor * self._more_or_less()

    def round_trip_s(self, peer: int, share: float) -> float:
        """Of this share of a message to ``peer``, and an empty one back."""
        return self.message_s((self._rank, peer), share) + self.message_s((peer, self._rank), 0.0)

    def _reduce_s(self, first: int, last: int) -> float:
        holders = next(count for (a, b), count in self._workers.items() if a <= first and last <= b)
        if self._truth is None:
            return reduce_s(self._costs, first, last, holders, self._copies)
        num_bytes = sum(layer.gradient_bytes for layer in self._costs.layers[first:last])
        return self._truth.reduced_s(num_bytes, holders, self._copies) * self._more_or_less()

    def microbatches_of(self, step: int) -> int:
        return self._microbatches

    def begin_step(self, step: int) -> None:
        """In a new generation every rank begins when it gets here."""
        if self._fresh or not self._seamless:
            self._done_s = time.monotonic()
        self._fresh = False
        self._step, self._began_s, self._late_s = step, self._done_s, 0.0
        since = max((one for one in self._slowed if one <= step), default=-1)
        self._speed = self._first_speed * self._slowed.get(since, 1.0)
        self._heads.clear()
        self._sums.clear()

    # -- compute ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        first: int,
        last: int,
        activation: torch.Tensor | None,
        *,
        ahead: bool = False,
        needs: Needs = None,
    ) -> torch.Tensor:
        if last == len(self._costs.layers) and not ahead:
            self._heads.append(microbatch)
        # What is run ahead has its input from this worker itself, which is through with it.
        message = None if ahead else activation
        if needs is None:
            return self._compute(("forward_s",), first, last, message)
        for layer in range(first, last):
            needs(layer)
            came_with = message if layer == first else None
            done = self._compute(("forward_s",), layer, layer + 1, came_with, self._weights_s(layer))
        return done

    def _weights_s(self, layer: int) -> float:
        """When those of ``layer`` are here: gathers run one after the other, each from when all have stepped."""
        free_s = 0.0
        for (first, last), holders in self._buckets.items():
            if (first, last) not in self._arrives_s:
                stepped = [one for at in range(first, last) for one in self._stepped[at].values()]
                start_s = max(free_s, *(float(one) for one in stepped))
                self._arrives_s[first, last] = start_s + gather_s(self._times, first, last, holders)
            free_s = self._arrives_s[first, last]
            if first <= layer < last:
                return free_s
        return 0.0

    def adopt(self, visits: Collection[tuple[int, int, int]]) -> None:
        self._heads += [microbatch for microbatch, _, last in visits if last == len(self._costs.layers)]

    def undo(self, visits: Any) -> None: ...

    def drop_flights(self) -> None: ...

    def input_grad(
        self,
        microbatch: int,
        first: int,
        last: int,
        grad: torch.Tensor | None,
        *,
        word: Any = None,
        passed: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        # A fused backward sends its gradient when all of it is done, so that is the time in the message.
        kinds = ("input_grad_s", "weight_grad_s") if self._fused else ("input_grad_s",)
        if passed is None:
            return self._compute(kinds, first, last, grad)
        passed(last)
        for layer in reversed(range(first, last)):
            done = self._compute(kinds, layer, layer + 1, grad if layer == last - 1 else None)
            passed(layer + 1)
        return done

    def weight_grad(self, microbatch: int, first: int, last: int) -> None:
        if not self._fused:
            self._compute(("weight_grad_s",), first, last, None)

    def summands(self, first: int, last: int, part: int, *, spread: bool) -> Summands:
        """One buffer with a place for each rank: after the sum it says when each holder had come."""
        if spread:
            return Summands(())
        arrived = torch.zeros(self._world_size, dtype=torch.float64)
        arrived[self._rank] = self._done_s
        self._sums.setdefault((first, last), {})[part] = arrived
        return Summands([arrived])

    def _wait_for_sums(self) -> None:
        """They ran beside, one after the other, each from when all holders had come."""
        free_s = 0.0
        for (first, last), arrived in self._sums.items():
            came_s = max(float(one.max()) for one in arrived.values())
            free_s = max(free_s, came_s) + self._reduce_s(first, last)
        self._sums.clear()
        self._until(max(self._done_s, free_s))

    def empty_message(self) -> torch.Tensor:
        return torch.empty(2, dtype=torch.float64)

    def local_totals(self) -> torch.Tensor:
        self._wait_for_sums()
        totals = torch.zeros(self.num_totals, dtype=torch.float64)
        totals[self._rank], totals[self._world_size + self._rank] = self._done_s, self._late_s
        return totals

    def suspect(self, microbatches: Any) -> None:
        pass

    def apply(self, totals: torch.Tensor, checkpoint: Any) -> Outcome:
        done_s, late_s = (float(part.max()) for part in totals.split(self._world_size))
        optimizer_s = self._times.optimizer_s_per_byte * self.optimizer_bytes() * self._more_or_less()
        self.busy_s += optimizer_s
        self._until(done_s + self._times.agreement_s + optimizer_s)
        self._arrives_s.clear()
        for one in self._own_slices:
            one.fill_(self._done_s)
        checkpoint()
        self.held = {layer: self.held[layer] for layer in self._mine}
        for state in self.held.values():
            for updated, _ in state.values():
                updated += 1
        return Outcome(
            losses={"modelled_s": self._done_s - self._began_s, "late_s": max(late_s, self._late_s)},
            tokens=self._tokens,
            num_microbatches=self._microbatches,
        )

    def samples_of_losses(self) -> dict[int, list[int]]:
        return {m: [self._step * self._microbatches + m] for m in self._heads}

    # -- state ------------------------------------------------------------------------------------------------------

    def optimizer_bytes(self) -> int:
        return self._cell.each * self._kept_bytes

    def _names(self, layer: int) -> list[str]:
        return [f"w{part}" for part in self._cell.parts.held]

    def _of_part(self, layer: int, part: int) -> list[str]:
        return [f"w{part}"]

    def _begun(self, layer: int, name: str) -> list[torch.Tensor]:
        return [torch.tensor([0]), torch.zeros(self._layer_bytes, dtype=torch.uint8)]

    def _empty(self, layer: int, name: str) -> list[torch.Tensor]:
        return [torch.tensor([-1]), torch.zeros(self._layer_bytes, dtype=torch.uint8)]

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        if not self._stepped:
            return super().weights_of(layer, part, spans)
        found = self._stepped[layer]
        return {f"{layer} {span}": found[span] for span in (found if EVERYTHING in spans else spans)}

    def take_layout(self, layout: Layout, worker: int) -> None:
        super().take_layout(layout, worker)
        self._workers = {(block.first, block.last): len(block.holders) for block in layout.blocks()}
        self._mine = layout.held_by(worker)
        self._copies, states = layout.copies, layout.states
        self._kept_bytes = sum(
            bytes_of(span, self._times.all_layers[layer].optimizer_bytes)
            for layer, spans in layout.spans_kept_by(worker).items()
            for span in spans
        )
        cut = {layer: states[layer] for layer in self._mine if layout.keepers and len(states[layer]) > 1}
        self._stepped = {
            layer: {one.span: torch.zeros(1, dtype=torch.float64) for one in found}
            for layer, found in cut.items()
        }
        self._own_slices = [
            self._stepped[layer][span]
            for layer, found in cut.items()
            for span in firsts(found).get(worker, ())
        ]
        own = [one for one in buckets(layout, self._costs) if worker in one.holders and one.first in cut]
        self._buckets = {
            (one.first, one.last): len(one.holders) for one in gather_order(own, layout.num_layers)
        }
        self._arrives_s.clear()
        self._done_s, self._fresh = time.monotonic(), True  # an interrupted step goes on from here
        # Only the first plan is Megatron's: recoveries are the planner's own.
        self._fused, self._megatron_start = self._megatron_start, False

    def updates(self) -> dict[str, int]:
        """Held layer -> in how many steps it was updated, all of it."""
        found = {str(layer): {int(one[0]) for one in state.values()} for layer, state in self.held.items()}
        return {layer: count for layer, (count,) in found.items()}


def measure_the_accelerator(model: Accelerator) -> None:
    """The product times layers by what its thread has computed, and links by a ping-pong of real messages. Here the
    first is what the accelerator was busy, and the second what its links take.
    """

    def ping_pong(group: Any, other: int, worker: int, message: torch.Tensor) -> LinkTimes:
        empty_s, message_s = (min(model.message_s(share=share) for _ in range(5)) for share in (0.0, 1.0))
        size = model.bytes_of_a_message
        return LinkTimes(worker=worker, message_bytes=size, empty_s=empty_s, message_s=message_s)

    def exchange(neighbours: Neighbours, message: torch.Tensor, now: Any) -> Exchanged:
        return {
            peer: [((0.0, model.round_trip_s(peer, 0.0)), (0.0, model.round_trip_s(peer, 1.0)))] * 3
            for peer in neighbours.order
        }

    Neighbours.exchange = exchange
    Neighbours.sums = lambda neighbours, message, now: {}
    timing.time = SimpleNamespace(monotonic=time.monotonic, thread_time=lambda: model.busy_s)
    product_rank.link_times = ping_pong
    # What an instruction waits for is within it here, and so the clock on the wall says nothing about processors.
    timing._held = lambda step, trace, wall: HeldSeen(step=step, computed_s=1.0, wall_s=1.0)


def keep_quiet(member: Member) -> None:
    """Have it publish no measurements: what sleeps uses no CPU time."""
    member.reports.publish_observations = lambda observations_json: None


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    try:
        train(config_from(parser.parse_args()))
    except JobStopped as stop:
        raise SystemExit(stop.exit_code) from None
    except Fenced:  # its cell has lost another rank, or is to have another size
        raise SystemExit(EXIT_FENCED) from None


def train(config: OdysseyConfig) -> None:
    """Raises JobStopped, Fenced."""
    emulation = load_emulation(config.run_dir)
    member = Member.connect(config)
    if not load_truth(config.run_dir):
        keep_quiet(member)
    journal = journal_of(member.rank, config.run_dir)
    init_default_group(member)
    cell = member.cell(emulation.job)
    if member.joins:
        if cell.full > 1:
            member.company.meet(cell)
        member.join()
    else:
        member.starting.post_job(emulation.job, to_json(emulation.profile))
    truth = load_truth(config.run_dir)
    model = Accelerator(emulation, truth, member.rank, member.world_size, cell)
    if truth is not None:
        measure_the_accelerator(model)
    rank = RankRuntime(
        config=config,
        member=member,
        model=model,
        cell=cell,
        build=lambda number, named, before: build_groups(member, number, named, config, before=before),
        tagged_messages=True,
        fault_point=Injector(config.injections, member.rank, journal, member.incarnation).at,
        journal=journal,
        on_commit=lambda step, outcome: None,
    )
    recover.train(
        member,
        rank,
        train_steps=emulation.job.train_steps,
        after_step=lambda recovery: time.sleep(emulation.rests_s),
    )
    journal.event("weights", digest=model.updates())
    Path(config.run_dir, f"cpu_s-{member.rank}").write_text(str(time.process_time()))


if __name__ == "__main__":
    main()
