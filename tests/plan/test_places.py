"""Kernels of communicators wait on a device for other ranks, and it must have places for some of them: for two."""

from dataclasses import replace
from itertools import islice, pairwise
from random import Random

import pytest

from odyssey_megatron.plan.layout import Hop, Layout, Route
from odyssey_megatron.plan.schedule import MESSAGE, SEND, Op
from odyssey_megatron.plan.scheduling.generate import build_schedule
from tests.plan.samples import uniform_costs

RECEIVED = {Op.FORWARD: Op.RECV_FORWARD, Op.INPUT_GRAD: Op.RECV_BACKWARD, Op.BACKWARD: Op.RECV_BACKWARD}
"""What an instruction may need."""


def comes_to_its_end(schedule, places):
    """On devices with one queue each, whatever takes how long: nothing begins before all ahead of it have begun, a
    message or sum has a place from then on until all its ends have begun, and a channel does one after the other.
    """
    programs = dict(schedule.programs)
    ends = {}
    for worker, program in programs.items():
        for instr in program:
            if instr.op in MESSAGE or instr.op is Op.REDUCE_GRAD:
                ends.setdefault(_key(instr), set()).add(worker)
    at = dict.fromkeys(programs, 0)
    waiting = {worker: {} for worker in programs}  # by channel
    begun = {key: set() for key in ends}

    def begins(worker, instr):
        key = _key(instr)
        if key not in ends:
            needed = key if instr.op not in RECEIVED else (RECEIVED[instr.op], instr.microbatch, _edge(instr))
            return worker not in ends.get(needed, ()) or begun[needed] == ends[needed]
        channel = (instr.op in SEND, instr.peer) if instr.op in MESSAGE else tuple(sorted(ends[key]))
        if channel in waiting[worker] or len(waiting[worker]) == places:
            return False
        begun[key].add(worker)
        waiting[worker][channel] = key
        if begun[key] == ends[key]:
            for end in ends[key]:
                waiting[end] = {one: other for one, other in waiting[end].items() if other != key}
        return True

    moves = True
    while moves:
        moves = False
        for worker, program in programs.items():
            while at[worker] < len(program) and begins(worker, program[at[worker]]):
                at[worker] += 1
                moves = True
    return all(at[worker] == len(program) for worker, program in programs.items())


def _key(instr):
    """The same at all ends."""
    if instr.op in MESSAGE:
        forward = instr.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        return Op.RECV_FORWARD if forward else Op.RECV_BACKWARD, instr.microbatch, instr.first
    return instr.op, instr.first, instr.last


def _edge(instr):
    return instr.first if instr.op is Op.FORWARD else instr.last


def layouts():
    """Routes to and fro among a few workers, so that each has many channels."""
    for seed in range(600):
        draw = Random(seed)
        num_layers, workers, microbatches = draw.choice((8, 12)), draw.choice((4, 6)), draw.choice((8, 12))
        cuts = [
            sorted(draw.sample(range(1, num_layers), draw.choice((3, 4)))) for _ in range(draw.choice((1, 3)))
        ]
        routes, holders = [], [set() for _ in range(num_layers)]
        for microbatch in range(microbatches):
            edges, hops = [0, *draw.choice(cuts), num_layers], []
            for first, last in pairwise(edges):
                before = hops[-1].worker if hops else -1
                worker = draw.choice([one for one in range(workers) if one != before])
                hops.append(Hop(worker=worker, first=first, last=last))
                for layer in range(first, last):
                    holders[layer].add(worker)
            routes.append(Route(microbatches=(microbatch,), hops=tuple(hops)))
        yield Layout(holders=tuple(tuple(sorted(own)) for own in holders), routes=tuple(routes))


@pytest.mark.parametrize("bucket_bytes", [0, None])
def test_two_places_are_enough(bucket_bytes):
    for layout in layouts():
        costs = replace(uniform_costs(layout.num_layers), bucket_bytes=bucket_bytes)
        assert comes_to_its_end(build_schedule(layout, costs), places=2), layout


def test_one_place_is_not():
    """Of two neighbours each receives ahead of what it sends the other."""
    stuck = [
        layout
        for layout in islice(layouts(), 20)
        if not comes_to_its_end(build_schedule(layout, uniform_costs(layout.num_layers)), places=1)
    ]
    assert len(stuck) > 10
