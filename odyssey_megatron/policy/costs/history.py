"""What the ranks have measured in recent steps: how fast each was at each piece of work."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from odyssey_megatron.diagnosis.cells import OwnWork, with_ranks
from odyssey_megatron.diagnosis.change import RECENT
from odyssey_megatron.diagnosis.held_up import HeldUp, with_held_up
from odyssey_megatron.diagnosis.links import LinkTiming, SumTiming, diagnose_links, diagnose_sums
from odyssey_megatron.diagnosis.steps import StepTimes
from odyssey_megatron.diagnosis.timings import TimedWork, Timing, Timings
from odyssey_megatron.diagnosis.verdicts import Diagnosis, diagnose, with_uneven_sequences
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.sending.runs import from_runs
from odyssey_megatron.policy.costs.measured import (
    ExpertsSeen,
    HeldSeen,
    LinkSeen,
    Measured,
    StepSeen,
    SumSeen,
    UnevenSeen,
)
from odyssey_megatron.policy.costs.profile import Observation

T = TypeVar("T")
_STEPS = 48
"""Number of measured steps that are kept. If a worker is slow for longer, no step from before that is left."""
_ROWS = 300_000
"""The most observations that are kept in total, but at least those of three steps."""
_KINDS = {"forward_s": "forward", "input_grad_s": "input gradient", "weight_grad_s": "weight gradient"}


_DELAYS = 0.01
"""A fraction of a microbatch's time in a stage. A link that takes less than that longer than others makes no step 2 %
longer, since a pipeline waits for a message at most twice a microbatch, down and up.
"""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The measured steps of the newest process of one rank."""

    incarnation: int
    steps: Mapping[int, tuple[Observation, ...]]
    links: Mapping[int, tuple[LinkSeen, ...]] = field(default_factory=dict)
    sums: Mapping[int, tuple[SumSeen, ...]] = field(default_factory=dict)
    took: Mapping[int, StepSeen] = field(default_factory=dict)
    held: Mapping[int, HeldSeen] = field(default_factory=dict)
    experts: Mapping[int, ExpertsSeen] = field(default_factory=dict)
    uneven: Mapping[int, UnevenSeen] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """The recent measurements of all ranks. Immutable: adding what the ranks have published makes a new one."""

    cell_size: int
    seen: Mapping[int, _Seen] = field(default_factory=dict)
    spreads_experts: bool = False
    """Whether experts are spread over the ranks of a cell."""
    packs_sequences: bool = False
    """See ``JobSpec``. Without it all sequences are equally long, whatever microbatches take: on busy cores a forward
    and the backward behind it may be held up together."""

    def with_published(self, published: Mapping[int, Measured], incarnations: Mapping[int, int]) -> History:
        """Return the history with what ranks have ``published``, by rank.

        ``incarnations``: the present process of each rank, where known; measurements of others are forgotten.
        """
        seen = dict(self.seen)
        for rank, measured in published.items():
            before = seen.get(rank, _Seen(measured.incarnation, {}))
            if before.incarnation != measured.incarnation:
                before = _Seen(measured.incarnation, {})
            steps, links, sums = dict(before.steps), dict(before.links), dict(before.sums)
            for step in {one.step for one in measured.spans}:
                steps[step] = tuple(one for one in measured.spans if one.step == step and one.samples > 0)
            for step in {one.step for one in measured.links}:
                links[step] = tuple(one for one in measured.links if one.step == step)
            for step in {one.step for one in measured.sums}:
                sums[step] = tuple(one for one in measured.sums if one.step == step)
            took = {**before.took, **{one.step: one for one in measured.steps}}
            held = {**before.held, **{one.step: one for one in measured.held}}
            experts = {**before.experts, **{one.step: one for one in measured.experts}}
            uneven = {**before.uneven, **{one.step: one for one in measured.uneven}}
            seen[rank] = _Seen(measured.incarnation, steps, links, sums, took, held, experts, uneven)
        for rank, incarnation in incarnations.items():
            if rank in seen and seen[rank].incarnation != incarnation:
                del seen[rank]
        known = sorted({step for one in seen.values() for step in one.steps})
        in_each = len(_KINDS) * max(1, len(seen))
        oldest = known[-min(len(known), max(3, min(_STEPS, _ROWS // in_each))) :][:1]
        kept = {
            rank: _Seen(
                one.incarnation,
                _since(one.steps, oldest),
                _since(one.links, oldest),
                _since(one.sums, oldest),
                _since(one.took, oldest),
                _since(one.held, oldest),
                _since(one.experts, oldest),
                _since(one.uneven, oldest),
            )
            for rank, one in seen.items()
        }
        return replace(self, seen=kept)

    def timings(self) -> Timings:
        """Return timings by worker: a cell is as slow as its slowest rank."""
        longest: dict[tuple[int, int, TimedWork], tuple[float, int]] = {}
        for rank, step, one in self._observations():
            for field_name, kind in _KINDS.items():
                key = step, rank // self.cell_size, TimedWork(one.first, one.last, kind)
                longest[key] = max(longest.get(key, (0.0, 0)), (getattr(one, field_name), one.samples))
        return Timings.of(Timing(*key, seconds, count=count) for key, (seconds, count) in longest.items())

    def link_timings(self) -> list[LinkTiming]:
        """Return timings of links by worker: between two cells the slowest link of their ranks counts."""
        longest: dict[tuple[int, int, int], float] = {}
        for rank, of_rank in self.seen.items():
            for step, links in of_rank.links.items():
                for one in links:
                    key = step, rank // self.cell_size, one.worker
                    longest[key] = max(longest.get(key, 0.0), one.message_s)
        return [LinkTiming(*key, seconds) for key, seconds in sorted(longest.items())]

    def sum_timings(self) -> list[SumTiming]:
        """Return the timings of sums; of several ranks' the longest counts."""
        longest: dict[tuple[int, str], float] = {}
        for of_rank in self.seen.values():
            for step, sums in of_rank.sums.items():
                for one in sums:
                    longest[step, one.workers] = max(longest.get((step, one.workers), 0.0), one.seconds)
        return [SumTiming(step, from_runs(of), seconds) for (step, of), seconds in sorted(longest.items())]

    def held_up(self) -> list[HeldUp]:
        """Return by worker what was computed in each step, by both clocks; nothing for cells.

        The ranks of a cell wait for each other while they compute, so that by the clock on the wall each of them is
        held up, most of all the one that waits most.
        """
        if self.cell_size > 1:
            return []
        seen = ((step, rank, one) for rank, of in self.seen.items() for step, one in of.held.items())
        return [
            HeldUp(step, rank, one.computed_s, one.wall_s)
            for step, rank, one in sorted(seen, key=lambda row: row[:2])
        ]

    def own_work(self) -> Iterable[OwnWork]:
        """Return what each rank itself computed in each step, and its probe."""
        for rank, of_rank in self.seen.items():
            for step, spans in of_rank.steps.items():
                probes = [one.forward_s for one in spans if one.last == one.first]
                own = [one for one in spans if one.last > one.first]
                layers = tuple(sorted((one.first, one.last) for one in own))
                computed_s = sum(one.forward_s + one.input_grad_s + one.weight_grad_s for one in own)
                yield OwnWork(step, rank, layers, computed_s, max(probes, default=0.0))

    def uneven(self) -> list[tuple[int, float, float]]:
        """Return (step, spread, together) of each rank."""
        seen = [one for of_rank in self.seen.values() for one in of_rank.uneven.values()]
        return [(one.step, one.spread, one.together) for one in seen]

    def expert_loads(self) -> dict[int, float]:
        """Return how unevenly experts load gangs, as the median of the last steps (``cluster/expert_loads.py``)."""
        by_step = {step: one.loads for of in self.seen.values() for step, one in of.experts.items()}
        found: dict[int, list[float]] = {}
        for step in sorted(by_step)[-RECENT:]:
            for size, load in by_step[step]:
                found.setdefault(size, []).append(load)
        return {size: statistics.median(loads) for size, loads in sorted(found.items())}

    def step_times(self) -> StepTimes:
        """Return the median time of each step of the newest generation."""
        took = [one for of_rank in self.seen.values() for one in of_rank.took.values()]
        newest = max((one.generation for one in took), default=-1)
        seconds: dict[int, list[float]] = {}
        for one in took:
            if one.generation == newest:
                seconds.setdefault(one.step, []).append(one.seconds)
        return StepTimes(
            generation=newest, seconds={step: statistics.median(of) for step, of in sorted(seconds.items())}
        )

    def diagnosis(
        self,
        before: Diagnosis,
        costs: Costs,
        nodes: Mapping[int, int] = MappingProxyType({}),
    ) -> Diagnosis:
        """Return the verdicts that follow from this history.

        Some pieces were only computed by workers that were slow ``before``. Their costs are those in ``before``, or
        else those in ``costs``, which were measured on others. ``nodes``: worker -> node; without it there are no
        verdicts on links.
        """
        timings = self.timings()
        holders: dict[int, set[int]] = {}
        for piece, worker in set(zip(timings.piece.tolist(), timings.worker.tolist(), strict=True)):
            holders.setdefault(piece, set()).add(timings.workers[worker])
        only_slow = [
            timings.pieces[piece] for piece, workers in holders.items() if before.slow.keys() >= workers
        ]
        known = {piece: (_cost_s(costs, piece), 0.0) for piece in only_slow if piece.last > piece.first}
        known |= {piece: before.costs[piece] for piece in known.keys() & before.costs.keys()}
        found = diagnose(timings, known, before.slow)
        found = with_held_up(found, self.held_up(), before.held_up)
        found = with_uneven_sequences(found, self.uneven()) if self.packs_sequences else found
        found = with_ranks(found, self.own_work(), self.cell_size, spreads_experts=self.spreads_experts)
        times_s: dict[tuple[int, int], float] = {}
        for piece, (cost_s, _) in found.costs.items():
            times_s[piece.first, piece.last] = times_s.get((piece.first, piece.last), 0.0) + cost_s
        stages_s = [time_s for (first, last), time_s in times_s.items() if last > first]
        least_s = _DELAYS * statistics.median(stages_s) if stages_s else 0.0
        return replace(
            found,
            links=diagnose_links(self.link_timings(), nodes, least_s),
            sums=diagnose_sums(self.sum_timings(), nodes, least_s),
            took=self.step_times(),
            expert_loads=self.expert_loads(),
        )

    def healthy(self, diagnosis: Diagnosis) -> tuple[Observation, ...]:
        """Return for each span its time on a healthy worker, with the number of all samples."""
        samples: dict[tuple[int, int], int] = {}
        for _, _, one in self._observations():
            samples[one.first, one.last] = samples.get((one.first, one.last), 0) + one.samples
        return tuple(
            Observation(first=first, last=last, samples=count, **_times_s(diagnosis, first, last))
            for (first, last), count in sorted(samples.items())
        )

    def _observations(self) -> Iterable[tuple[int, int, Observation]]:
        for rank, of_rank in self.seen.items():
            for step, spans in of_rank.steps.items():
                for one in spans:
                    yield rank, step, one


def _since(steps: Mapping[int, T], oldest: list[int]) -> dict[int, T]:
    return {step: of for step, of in steps.items() if [step] >= oldest}


def _times_s(diagnosis: Diagnosis, first: int, last: int) -> dict[str, Any]:
    return {
        name: diagnosis.costs.get(TimedWork(first, last, kind), (0.0, 0.0))[0]
        for name, kind in _KINDS.items()
    }


def _cost_s(costs: Costs, piece: TimedWork) -> float:
    name = next(name for name, kind in _KINDS.items() if kind == piece.kind)
    return max(1e-9, sum(float(getattr(layer, name)) for layer in costs.layers[piece.first : piece.last]))
