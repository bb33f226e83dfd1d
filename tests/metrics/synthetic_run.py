"""A run that never happened, written through the real Journal with a scripted clock.

8 ranks, 4 stages x 2 pipelines, 12 microbatches of 1 sample. Rank 5 is killed in step 6 (rerouted) and rank 0
in step 13; while the job recovers from that, rank 3 is killed too, so that its generation is superseded. Between
steps 9 and 10 the job changes to another plan, as offered; what is offered after step 10 nobody takes. Before step 4
all wait for a checkpoint, and in steps 16 and 17 rank 6 is slow.
"""

from __future__ import annotations

import functools
import math

from odyssey_megatron.codec import to_jsonable
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.layout import Hop, Layout, Route, layout_from_routes

RANKS, STAGES, MICROBATCHES, STEPS = 8, 4, 12, 20
STEP_S = 0.5
FIRST, SECOND = 6, 13
"""The steps in which failures strike."""
SWITCH = 10
"""The first step under the plan that was offered."""
SAVED, SAVE_S = 4, 1.25
SLOW, SLOWER_S = (16, 17), 0.3
WALL_OFFSET_S = 1.7e9
JOB = "ab12cd34"


class Clock:
    """Stands for the module ``time`` in the journal."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s

    def time(self):
        return self.now_s + WALL_OFFSET_S


def loss(step: int) -> float:
    return 2.2 + 3.3 * math.exp(-step / 5) + 0.03 * math.sin(3.0 * step)


class SyntheticRun:
    """``write()`` gives the folder; ``with_failures=False`` is the reference run."""

    def __init__(self, run_dir, clock: Clock, *, with_failures: bool):
        self.clock, self.with_failures = clock, with_failures
        self.agent = Journal(run_dir, source="agent0", job=JOB)
        self.ranks = {
            rank: Journal(run_dir, source=f"rank{rank}", rank=rank, job=JOB) for rank in range(RANKS)
        }
        self.other = Journal(run_dir, source="agent1", job=JOB)
        self.alive = list(range(RANKS))
        self.generation = self.newest = 1

    def write(self) -> None:
        self.agent.event("job_started", world_size=RANKS, nodes=2)
        for rank in range(RANKS):
            agent = self.agent if rank < RANKS // 2 else self.other
            agent.event("rank_started", target=rank, pid=1000 + rank, host=f"host{rank * 2 // RANKS}")
        self._decide((), "initial", "start")
        self._start(0)
        for step in range(STEPS):
            if self.with_failures and step == FIRST:
                self._attempt(step, until=5)
                self._fail(step, 5, detect_s=0.012)
                self._decide((5,), "reroute", "rank 5 was killed")
                self._recover(step, (5,), "reroute")
            if self.with_failures and step == SWITCH:
                self._decide((5,), "fill", "the layout is better after all", planned=True)
                self._switch(step)
            if self.with_failures and step == SWITCH + 1:
                self._decide((5,), "replan", "nobody takes this one", planned=True)
            if self.with_failures and step == SECOND:
                self._attempt(step, until=12)
                self._fail(step, 0, detect_s=0.010)
                self._decide((0,), "reroute", "rank 0 was killed")
                self.clock.now_s += 0.030
                self._fail(step, 3, detect_s=0.020)
                self._decide((3,), "replan", "rank 3 was killed")
                self._recover(step, (3,), "replan")
            if step == SAVED:
                self.clock.now_s += SAVE_S
                self.ranks[0].event("saved", generation=self.generation, step=step, save_s=SAVE_S)
            if self.with_failures and step in SLOW:
                self.clock.now_s += SLOWER_S
            self._attempt(step, until=MICROBATCHES)
            if self.with_failures and step + 1 in (SLOW[0], SLOW[-1] + 1):
                self._measured(2.0 if step + 1 == SLOW[0] else 1.0)
            self._commit(step, redone=self.with_failures and step in (FIRST, SECOND))
        self.agent.event("job_finished", verdict="trained", exit_code=0)

    def _fail(self, step: int, rank: int, *, detect_s: float) -> None:
        self.ranks[rank].event(
            "injected", generation=self.generation, step=step, at="backward", signal="KILL"
        )
        self.alive.remove(rank)
        self.clock.now_s += detect_s
        self.agent.event("failure_detected", generation=self.generation, dead=[rank], code=-9, cause="killed")

    def _decide(self, dead, policy, why, *, planned: bool = False) -> None:
        if dead:
            self.newest += 1
        if not planned:
            self.generation = self.newest
        table = [
            {
                "name": name,
                "step_s": step_s,
                "transition_s": transition_s,
                "score": score,
                "chosen": name == policy,
                "reason": reason,
            }
            for name, step_s, transition_s, score, reason in (
                (
                    "reroute",
                    0.61,
                    0.09,
                    3.1e6,
                    "no state to move; the busiest worker runs 12 of 12 microbatches",
                ),
                ("replan", 0.55, 0.48, 3.3e6, "pipelines of 4 and 3 stages; moves 14.2 MiB in 2 rounds"),
                ("replan 2+5", None, None, None, "rejected: worker 4 would need 210 MiB, the cap is 160 MiB"),
            )
        ]
        self.clock.now_s += 0.004
        self.agent.event(
            "decision",
            generation=self.newest,
            dead=list(dead),
            why=why,
            policy=policy,
            plan_hash=f"{self.newest:012x}",
            candidates=table if dead else [],
            decide_s=0.004,
            planned=planned,
            layout=to_jsonable(self.layout()),
            cell_size=1,
        )

    def _measured(self, factor: float) -> None:
        """How slow rank 6 is."""
        factors = [[rank, factor if rank == 6 else 1.0] for rank in self.alive]
        costs = [[first, last, "forward", (last - first) / 300] for first, last in ((0, 4), (4, 7), (7, 10))]
        why = "takes twice the time" if factor > 1 else "takes no longer"
        self.agent.event("slowness", kind="slow worker", slow_ranks=[6], speed=1 / factor, why=why)
        self.agent.event("measured", factors=factors, costs=costs)

    def layout(self) -> Layout:
        """Of those who are alive."""
        routes: dict = {}
        for microbatch, hops in enumerate(self._routes()):
            routes.setdefault(hops, []).append(microbatch)
        return layout_from_routes(
            10,
            tuple(
                Route(
                    microbatches=tuple(microbatches),
                    hops=tuple(Hop(worker=worker, first=first, last=last) for worker, first, last in hops),
                )
                for hops, microbatches in routes.items()
            ),
        )

    def _start(self, step: int) -> None:
        for rank in self.alive:
            self.ranks[rank].event(
                "generation_started",
                generation=self.generation,
                step=step,
                members=list(self.alive),
                agreed_s=self.clock.now_s,
            )

    def _switch(self, step: int) -> None:
        self.generation = self.newest
        self._start(step)
        for rank in self.alive:
            self.ranks[rank].event(
                "switched",
                generation=self.generation,
                step=step,
                policy="fill",
                plan_hash=f"{self.generation:012x}",
                groups_s=0.001,
                agree_s=0.002,
                transfer_s=0.003 + rank / 1000,
                fill_s=0.2,
            )

    def _recover(self, step: int, dead, policy: str) -> None:
        """Rank r is 1 ms later than rank r-1, so that 'the slowest' is a definite one."""
        start_s = self.clock.now_s
        self._start(step)
        for rank in self.alive:
            self.clock.now_s = start_s + 0.100
            late_s = rank / 1000
            self.ranks[rank].event(
                "recovered",
                generation=self.generation,
                step=step,
                dead=list(dead),
                policy=policy,
                plan_hash=f"{self.generation:012x}",
                decide_s=0.004,
                abort_s=0.002 + late_s,
                agree_s=0.003,
                groups_s=0.020 + late_s,
                transfer_s=0.0 if policy == "reroute" else 0.040,
                in_groups_s=start_s + 0.030 + late_s,
                resumed_s=start_s + 0.090 + late_s,
                outcome="redo",
            )

    def _attempt(self, step: int, *, until: int) -> None:
        """The heads log their samples; only a whole attempt takes the whole time and is traced."""
        routes = self._routes()
        for head in sorted({route[-1][0] for route in routes}):
            mine = [m for m in range(until) if routes[m][-1][0] == head]
            self.ranks[head].event(
                "samples",
                generation=self.generation,
                step=step,
                microbatches=mine,
                samples=[[step * MICROBATCHES + m] for m in mine],
            )
        self.clock.now_s += STEP_S * until / MICROBATCHES
        if until == MICROBATCHES:
            start_s = self.clock.now_s - STEP_S
            for rank, program in trace(routes).items():
                shifted = [[text, start_s + a, start_s + b] for text, a, b in program]
                self.ranks[rank].event("trace", generation=self.generation, step=step, instructions=shifted)

    def _commit(self, step: int, *, redone: bool) -> None:
        for rank in self.alive[-2:]:
            drift = 1e-13 if self.with_failures and step > FIRST else 0.0
            self.ranks[rank].event(
                "step_committed",
                generation=self.generation,
                step=step,
                loss={"lm loss": loss(step) * (1 + drift * (step % 3))},
                grad_norm=1.0,
                lr=1e-3,
                step_s=STEP_S,
                tokens=MICROBATCHES * 64,
                num_microbatches=MICROBATCHES,
            )
            if redone:
                self.ranks[rank].event("redone", generation=self.generation, step=step, redo_s=STEP_S)

    def _routes(self) -> tuple:
        """Of each microbatch: (rank, first layer, last layer) hops over 10 layers."""
        ends = (0, 3, 5, 7, 10)
        pipelines = [
            [(stage * 2 + replica, ends[stage], ends[stage + 1]) for stage in range(STAGES)]
            for replica in range(2)
        ]
        if len(self.alive) == 5:  # replanned: pipelines of 3 and 2 stages
            pipelines = [
                [(1, 0, 4), (2, 4, 7), (6, 7, 10)],
                [(4, 0, 5), (7, 5, 10)],
            ]
        routes = []
        for m in range(MICROBATCHES):
            hops = pipelines[m % 2]
            routes.append(tuple((r if r in self.alive else r ^ 1, a, b) for r, a, b in hops))
        return tuple(routes)


@functools.cache
def trace(routes) -> dict[int, list]:
    """A greedy execution: backward before forward before weight gradient, whatever is ready first."""
    forward_s, done, free, programs = 0.01, {}, {}, {}
    todo = [("F", m, i) for m, hops in enumerate(routes) for i in range(len(hops))]
    todo += [("I", m, i) for m, hops in enumerate(routes) for i in range(len(hops))]
    todo += [("W", m, i) for m, hops in enumerate(routes) for i in range(len(hops))]

    def ready_s(task):
        kind, m, i = task
        last = len(routes[m]) - 1
        needs = {
            "F": [("F", m, i - 1)] if i else [],
            "I": [("I", m, i + 1)] if i < last else [("F", m, i)],
            "W": [("I", m, i)],
        }[kind]
        return max((done.get(one, math.inf) for one in needs), default=0.0)

    while todo:

        def start(task):
            rank = routes[task[1]][task[2]][0]
            return (max(ready_s(task), free.get(rank, 0.0)), "IFW".index(task[0]), task[1])

        task = min(todo, key=start)
        kind, m, i = task
        rank, first, last = routes[m][i]
        begin = start(task)[0]
        end = begin + forward_s * (last - first) / 3
        program = programs.setdefault(rank, [])
        if kind == "F" and i:
            program.append([f"RECV_F{m}[{first}]<{routes[m][i - 1][0]}", free.get(rank, 0.0), begin])
        program.append([f"{kind}{m}[{first}:{last}]", begin, end])
        done[task], free[rank] = end, end
        todo.remove(task)
    end = max(free.values())
    for rank, program in programs.items():
        program += [["REDUCE_GRAD[0:10]", free[rank], end + 0.01], ["STEP", end + 0.01, end + 0.02]]
    return programs
