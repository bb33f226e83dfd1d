"""An interrupted step goes on: whatever was done when whoever died, the rest is done exactly once, by somebody."""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odyssey_megatron.errors import PlanInfeasible
from odyssey_megatron.execute.progress import Progress
from odyssey_megatron.plan.layout import layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.placing.memory import state_bytes
from odyssey_megatron.plan.placing.redundancy import with_shadows
from odyssey_megatron.plan.schedule import COMPUTE, MESSAGE, SEND, Instr, Op, Schedule
from odyssey_megatron.plan.scheduling.generate import build_schedule
from odyssey_megatron.plan.scheduling.resume import (
    BEGINS,
    REACHES,
    Levels,
    cuts_of,
    done_visits,
    fits,
    levels_at,
    rest,
    runs_apart,
    usable,
)
from odyssey_megatron.policy.policies.drop import drop_pipelines
from odyssey_megatron.policy.policies.shift import shift_layers
from odyssey_megatron.policy.routes.rerouting import reroute
from tests.plan.samples import eager_schedule, uniform_costs

SLOW = "ODYSSEY_SLOW_TESTS" in os.environ


class Running:
    """Workers that carry out programs in any interleaving, and keep what the real ones keep (``execute/``)."""

    def __init__(self, layout):
        self.layout = layout
        self.tables = {
            w: [[0] * layout.num_layers for _ in range(layout.num_microbatches)] for w in layout.workers
        }
        self.results = {worker: set() for worker in layout.workers}
        self.begun = {worker: set() for worker in layout.workers}
        self.backed = set()
        self.ahead = {worker: [] for worker in layout.workers}
        self.saved = 0
        self.sums = {worker: Counter() for worker in layout.workers}
        self.ran = Counter()

    def can_keep(self, layout):
        """Whether ``layout`` gives every visit that was begun to the same worker, and begins and ends a block at its
        edges; unless weight gradients, which layers have one by one, are all that is left of its hop.

        From what was carried out, not from the tables.
        """
        cuts = {block.first for block in layout.blocks()} | {layout.num_layers}
        paths = {m: route.hops for route in layout.routes for m in route.microbatches}
        return all(
            any(
                hop.worker == worker
                and hop.first <= first
                and last <= hop.last
                and (
                    {first, last} <= cuts
                    or {(worker, microbatch, layer) for layer in range(hop.first, hop.last)} <= self.backed
                )
                for hop in paths[microbatch]
            )
            for worker, begun in self.begun.items()
            for microbatch, first, last in begun
        )

    def to_do(self):
        """Layers of microbatches times instructions that nobody alive has done."""
        return sum(REACHES[Op.WEIGHT_GRAD] - code % BEGINS for row in self.total() for code in row)

    def lose(self, dead):
        for worker in dead:
            for kept in (self.tables, self.results, self.begun, self.sums, self.ahead):
                del kept[worker]

    def forget(self, workers):
        for worker in workers:
            self.tables[worker] = [[0] * self.layout.num_layers for _ in self.tables[worker]]
            self.results[worker], self.begun[worker] = set(), set()
            self.sums[worker], self.ahead[worker] = Counter(), []
            self.backed = {one for one in self.backed if one[0] != worker}

    def total(self):
        return [
            [sum(codes) for codes in zip(*rows, strict=True)]
            for rows in zip(*self.tables.values(), strict=True)
        ]

    def go(self, schedule, rng, most=None):
        """Runs until nobody can, or for ``most`` instructions; returns whether all came to their reductions."""
        programs = {
            w: [i for i in program if i.op not in (Op.REDUCE_GRAD, Op.STEP)]
            for w, program in schedule.programs
        }
        at, sent, posted, arrived = dict.fromkeys(programs, 0), defaultdict(list), defaultdict(list), set()
        while most is None or most > 0:
            ready = [
                w
                for w in programs
                if at[w] < len(programs[w]) and self._can(w, programs[w][at[w]], arrived, sent, posted)
            ]
            if not ready:
                break
            worker = rng.choice(ready)
            instr = programs[worker][at[worker]]
            at[worker] += 1
            most = None if most is None else most - 1
            if instr.op is Op.EAGER_FORWARD:
                assert not instr.first or (True, instr.microbatch, instr.first) in self.results[worker]
                self.ahead[worker].append((instr.microbatch, instr.first, instr.last))
                continue
            if instr.op in COMPUTE:
                self._compute(worker, instr)
                continue
            forward = instr.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
            name = (forward, instr.microbatch, instr.first)
            if instr.op in SEND:
                assert name in self.results[worker], f"{worker} has not got {instr}"
                channel = (worker, instr.peer)
                sent[channel].append(name)
            else:
                channel = (instr.peer, worker)
                posted[channel].append(name)
            for ours, theirs in zip(sent[channel], posted[channel], strict=False):
                assert ours == theirs, channel
                arrived.add((channel[1], *ours))
        return all(at[worker] == len(program) for worker, program in programs.items())

    def _can(self, worker, instr, arrived, sent, posted):
        if (
            instr.op in MESSAGE
        ):  # on one hardware queue: as soon as the one before it on this channel is through
            ends = sent[worker, instr.peer], posted[worker, instr.peer]
            ours, theirs = (
                ends if instr.op in SEND else (posted[instr.peer, worker], sent[instr.peer, worker])
            )
            return len(theirs) >= len(ours)
        forward = instr.op is Op.FORWARD
        if instr.op not in COMPUTE or instr.op is Op.WEIGHT_GRAD:
            return True
        edge = instr.first if forward else instr.last
        message = (forward, instr.microbatch, edge)
        return (
            edge in (0, self.layout.num_layers)
            or (worker, *message) in arrived
            or message in self.results[worker]
        )

    def _compute(self, worker, instr):
        row, before = (
            self.tables[worker][instr.microbatch],
            {Op.FORWARD: 0, Op.INPUT_GRAD: 1, Op.WEIGHT_GRAD: 2},
        )
        assert {code % BEGINS for code in row[instr.first : instr.last]} == {before[instr.op]}, (
            f"{instr}: {row}"
        )
        progress = Progress(1, len(row), keeps=True)  # what a real worker notes
        progress.table[0] = torch.tensor(row)
        progress.reached(instr._replace(microbatch=0), instr.op)
        row[:] = progress.table[0].tolist()
        if instr.op is not Op.WEIGHT_GRAD:
            self.begun[worker].add((instr.microbatch, instr.first, instr.last))
        if instr.op is Op.INPUT_GRAD:
            self.backed |= {(worker, instr.microbatch, layer) for layer in range(instr.first, instr.last)}
        self.ran[instr.op, worker] += instr.last - instr.first
        if instr.op is Op.WEIGHT_GRAD:
            self.sums[worker].update((instr.microbatch, layer) for layer in range(instr.first, instr.last))
        else:
            forward = instr.op is Op.FORWARD
            self.results[worker].add((forward, instr.microbatch, instr.last if forward else instr.first))

    def take_up(self, layout):
        for worker, ahead in self.ahead.items():
            visits = usable(layout, worker, begun(self.tables[worker]), ahead)
            for microbatch, first, last in visits:
                self._compute(worker, Instr(Op.FORWARD, microbatch, first, last))
            self.saved += len(visits)
            ahead.clear()


def begun(table):
    return {microbatch: row for microbatch, row in enumerate(table) if any(row)}


def goes_on(running, layout, schedule):
    """What the survivors agree on."""
    programs, cuts = dict(schedule.programs), cuts_of(layout)

    def apart():
        return [
            runs_apart(programs.get(worker, ()), begun(table), cuts)
            for worker, table in running.tables.items()
        ]

    if not all(fits(layout, worker, begun(table)) for worker, table in running.tables.items()):
        return None
    before = apart()
    running.take_up(layout)
    assert apart() == before
    return None if any(before) else resumed(layout, schedule, running.tables)


def resumed(layout, schedule, tables):
    """Each worker's own part, as each finds it by itself."""
    cuts = cuts_of(layout)
    told = [levels_at(cuts, np.array(table, dtype=np.uint8)) for table in tables.values()]
    levels = Levels(cuts, np.sum(told, axis=0, dtype=np.int32))
    return Schedule(
        programs=tuple(
            (worker, rest(program, begun(tables.get(worker, ())), levels))
            for worker, program in schedule.programs
        )
    )


@st.composite
def ragged(draw, even):
    """The same pipelines, each cut anywhere: what one worker computes at once, its peers hold in pieces."""
    inner = st.integers(1, even.num_layers - 1)
    routes = []
    for route in even.routes:
        stages = len(route.hops)
        ends = draw(st.lists(inner, min_size=stages - 1, max_size=stages - 1, unique=True))
        workers = tuple(hop.worker for hop in route.hops)
        routes.append(pipeline_route(workers, (*sorted(ends), even.num_layers), route.microbatches))
    return layout_from_routes(even.num_layers, tuple(routes))


@st.composite
def layouts(draw):
    pp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    blocks = draw(st.integers(pp, 2 * pp + 1))
    layout = megatron_layout(
        num_layers=blocks + 2,
        pipeline_size=pp,
        num_workers=pp * dp,
        num_microbatches=dp * draw(st.integers(1, 4)),
    )
    if draw(st.booleans()):
        layout = draw(ragged(layout))
    costs = uniform_costs(blocks + 2)
    if pp * dp > 1 and draw(st.booleans()):
        nodes, least = dict.fromkeys(range(pp * dp), 0), draw(st.integers(2, 3))
        layout = with_shadows(layout, None, nodes, least, costs, eager=draw(st.booleans()))
    return layout, costs


@settings(
    max_examples=5000 if SLOW else 200, derandomize=not SLOW, database=None,
)  # fmt: skip
@given(of=layouts(), seed=st.integers(0, 10**6), data=st.data())
@pytest.mark.timeout(3600 if SLOW else 120)
def test_after_failures_everything_is_done_once(of, seed, data):
    layout, costs = of
    rng, running, schedule = random.Random(seed), Running(layout), eager_schedule(layout, costs)[0]
    instructions = sum(len(program) for _, program in schedule.programs)
    for _ in range(data.draw(st.integers(1, 3), label="failures")):
        alive = list(running.tables)
        if len(alive) < 2:
            break
        running.go(schedule, rng, most=data.draw(st.integers(0, instructions), label="ran"))
        dead = data.draw(st.sets(st.sampled_from(alive), min_size=1, max_size=2), label="dead")
        how = data.draw(st.sampled_from(("reroute", "reroute", "drop", "shift")), label="how")
        try:
            layout = (
                reroute(layout, set(alive) - dead, costs)
                if how != "drop"
                else drop_pipelines(layout, set(alive) - dead)
            )
            layout = shift_layers(layout, costs) if how == "shift" else layout
        except PlanInfeasible:
            return
        running.lose(dead)
        # Some may have heard of a decision to do the step again, which others have not: those begin anew.
        running.forget(data.draw(st.sets(st.sampled_from(alive), max_size=1), label="forgetful") - dead)
        whole = eager_schedule(layout, costs)[0]
        must_go_on = running.can_keep(layout)
        assert must_go_on or how != "reroute"
        schedule = goes_on(running, layout, whole)
        assert (schedule is not None) == must_go_on
        if schedule is None:
            running, schedule = Running(layout), whole
    to_do, before = running.to_do(), running.ran.total()
    assert running.go(schedule, rng), "somebody waits for ever"
    assert running.ran.total() - before == to_do, "what survivors had done was done again"
    expected = {(m, layer): 1 for m in range(layout.num_microbatches) for layer in range(layout.num_layers)}
    assert sum(running.sums.values(), Counter()) == expected
    assert running.to_do() == 0


def test_forwards_run_ahead_are_not_done_again():
    """One pipeline of four; the worker before the dead one has run some of its forwards in its bubbles."""
    costs = uniform_costs(8, message_s=0.01)
    layout = megatron_layout(num_layers=8, pipeline_size=4, num_workers=4, num_microbatches=8)
    layout = with_shadows(layout, None, dict.fromkeys(range(4), 0), 2, costs, eager=True)
    for dead in range(4):
        rng, running = random.Random(dead), Running(layout)
        schedule, filled = eager_schedule(layout, costs)
        running.go(schedule, rng)  # to the end: whatever the dead one has run is lost
        running.lose({dead})
        after = reroute(layout, set(range(4)) - {dead}, costs)
        left = goes_on(running, after, eager_schedule(after, costs)[0])
        mine = [one for one in filled.forwards if one.routed == dead]
        assert running.saved == len(mine)
        again = [i for _, program in left.programs for i in program if i.op is Op.FORWARD]
        assert len(again) == 8 - len(mine)
        assert running.go(left, rng)
    assert {one.routed for one in filled.forwards} >= {0, 1}


PP2_DP2 = layout_from_routes(
    4, (pipeline_route((0, 2), (2, 4), (0, 2)), pipeline_route((1, 3), (2, 4), (1, 3)))
)


def test_only_what_the_dead_had_done_is_done_again():
    costs = uniform_costs(4)
    running = Running(PP2_DP2)
    running.go(build_schedule(PP2_DP2, costs), random.Random(1), most=24)
    done = {
        worker: sum(code > 0 for row in table for code in row) for worker, table in running.tables.items()
    }
    running.lose({2})
    after = reroute(PP2_DP2, {0, 1, 3}, costs)
    schedule = goes_on(running, after, build_schedule(after, costs))
    forwards = sum(
        i.last - i.first for _, program in schedule.programs for i in program if i.op is Op.FORWARD
    )
    assert forwards == 4 * 4 - (sum(done.values()) - done[2])
    sends = [str(i) for i in schedule.program(0) if i.op is Op.SEND_FORWARD]
    assert len(sends) == len(set(sends))


def test_a_takeover_by_the_neighbour_goes_on_without_a_message():
    """Worker 0 has done the forward of its own layers; the dead neighbour's come behind them."""
    costs = uniform_costs(4)
    layout = layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0,)),))
    layout = type(layout)(holders=((0, 2), (0, 2), (0, 1), (0, 1)), routes=layout.routes)
    after = reroute(layout, {0, 2}, costs)
    table = [[BEGINS + 1, 1, 0, 0]]
    left = resumed(after, build_schedule(after, costs), {0: table})
    assert str(left.program(0)[0]) == "F0[2:4]"
    assert [str(i) for i in left.program(0) if i.op in COMPUTE] == [
        "F0[2:4]", "I0[2:4]", "I0[0:2]", "W0[2:4]", "W0[0:2]",
    ]  # fmt: skip


def test_a_visit_that_the_plan_cuts_is_done_again():
    layout = layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0,)),))
    assert fits(layout, 0, {0: [BEGINS + 2, 2, 0, 0]})
    assert not fits(layout, 0, {0: [BEGINS + 2, 2, 2, 0]})
    assert not fits(layout, 1, {0: [BEGINS + 1, 1, 0, 0]})


@pytest.mark.parametrize("done", [(0, 2), (2, 4)])
def test_a_visit_whose_weight_gradients_have_run_in_part_is_not_cut(done):
    """Its peers hold its layers in two blocks, of which either may be summed first."""
    progress = Progress(1, 5, keeps=True)
    for op, first, last in ((Op.FORWARD, 0, 4), (Op.INPUT_GRAD, 0, 4), (Op.WEIGHT_GRAD, *done)):
        progress.reached(Instr(op, 0, first, last), op)
    rows = progress.rows()
    assert {(first, last) for first, last, _ in done_visits(rows[0])} == {(0, 2), (2, 4)}
    for ends, keeps in {(4, 5): True, (2, 5): False, (3, 5): False}.items():
        assert fits(layout_from_routes(5, (pipeline_route((0, 1), ends, (0,)),)), 0, rows) == keeps


def test_a_row_tells_its_visits():
    assert done_visits([BEGINS + 3, 3, BEGINS + 3, 0, 0, BEGINS + 1, 1]) == [(0, 2, 3), (2, 3, 3), (5, 7, 1)]
    assert done_visits([0, 0]) == []


def test_what_is_kept_counts_as_memory():
    costs = replace(uniform_costs(4), message_bytes=100)
    before, kept = (state_bytes(PP2_DP2, replace(costs, keeps_messages=keeps)) for keeps in (False, True))
    # Two microbatches each: activations from the first stage, input gradients from the second.
    assert {worker: kept[worker] - before[worker] for worker in kept} == dict.fromkeys(range(4), 200)
