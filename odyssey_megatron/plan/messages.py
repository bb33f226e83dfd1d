"""Passes ``Schedule -> Schedule`` that lower a compute order to what the interpreter runs."""

from __future__ import annotations

from collections import deque

from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.schedule import COMPUTE, Instr, Op, Program, Schedule

Neighbours = dict[tuple[int, int], tuple[int, int]]
"""(microbatch, first layer of a hop) -> (worker before, worker behind); -1 where there is none."""


def neighbours(layout: Layout) -> Neighbours:
    """Where each visit's activation comes from and goes to."""
    table: Neighbours = {}
    for route in layout.routes:
        workers = (-1, *(hop.worker for hop in route.hops), -1)
        ends = [(hop.first, workers[i], workers[i + 2]) for i, hop in enumerate(route.hops)]
        for microbatch in route.microbatches:
            for first, before, behind in ends:
                table[microbatch, first] = (before, behind)
    return table


def add_messages(schedule: Schedule, layout: Layout) -> Schedule:
    """Inserts sends right after their producer and receives one compute instruction before their consumer.

    Sends do not block, and receives are only posted: the consumer waits. So the one thing that order
    decides is matching: a channel (sender, receiver, kind) is FIFO, as NCCL's are. The receiver may consume
    in another order than the sender produces; then it posts the receives of the messages in between early,
    in the sender's order.
    """
    table = neighbours(layout)
    sending = {worker: _with_sends(program, table) for worker, program in schedule.programs}
    channels: dict[tuple[int, int, Op], deque[Instr]] = {}
    for worker, program in sending.items():
        for instr in program:
            if instr.peer >= 0:
                channels.setdefault((worker, instr.peer, instr.op), deque()).append(instr)
    return Schedule(
        programs=tuple(
            (worker, _with_receives(worker, program, table, channels)) for worker, program in sending.items()
        )
    )


def _with_sends(program: Program, table: Neighbours) -> list[Instr]:
    out: list[Instr] = []
    for instr in program:
        out.append(instr)
        op, microbatch, first, last, _ = instr
        if op is Op.FORWARD:
            peer = table[microbatch, first][1]
            if peer >= 0:
                out.append(Instr(Op.SEND_FORWARD, microbatch, last, -1, peer))
        elif op is Op.INPUT_GRAD or op is Op.BACKWARD:
            peer = table[microbatch, first][0]
            if peer >= 0:
                out.append(Instr(Op.SEND_BACKWARD, microbatch, first, -1, peer))
    return out


def _with_receives(
    worker: int,
    program: list[Instr],
    table: Neighbours,
    channels: dict[tuple[int, int, Op], deque[Instr]],
) -> Program:
    out: list[Instr] = []
    posted: set[tuple[Op, int, int]] = set()
    previous = 0  # where the compute instruction before the current one stands in ``out``
    for instr in program:
        op, microbatch, first, last, _ = instr
        if op not in COMPUTE:
            out.append(instr)
            continue
        before, behind = table[microbatch, first]
        here = len(out)
        if op is Op.FORWARD:
            peer, sent, kind, at = before, Op.SEND_FORWARD, Op.RECV_FORWARD, first
        elif op is not Op.WEIGHT_GRAD:
            peer, sent, kind, at = behind, Op.SEND_BACKWARD, Op.RECV_BACKWARD, last
        else:
            peer = -1
        if peer >= 0 and (kind, microbatch, at) not in posted:
            queue, posts = channels[peer, worker, sent], []
            while (kind, microbatch, at) not in posted:
                one = queue.popleft()
                posted.add((kind, one.microbatch, one.first))
                posts.append(Instr(kind, one.microbatch, one.first, -1, peer))
            out[previous:previous] = posts
            here += len(posts)
        out.append(instr)
        previous = here
    return tuple(out)


def reduction_order(layout: Layout) -> tuple[Block, ...]:
    """All blocks in the order in which everybody reduces them.

    In ragged layouts neighbouring blocks share workers, so going through them in layer order would make one
    chain of them all. Blocks without a common holder get one colour and run at the same time, colour after
    colour. Source: Chameleon's colouring of the conflict graph (papers.md §1.5); a worker's layers are
    mostly one span, and on such interval graphs the greedy colouring in layer order is optimal.
    """
    colours: list[tuple[int, Block]] = []
    used: dict[int, set[int]] = {worker: set() for worker in layout.workers}
    for block in reversed(layout.blocks()):
        taken = set().union(*(used[worker] for worker in block.holders))
        colour = next(c for c in range(len(taken) + 1) if c not in taken)
        for worker in block.holders:
            used[worker].add(colour)
        colours.append((colour, block))
    return tuple(block for _, block in sorted(colours, key=lambda item: item[0]))


def add_reductions(schedule: Schedule, layout: Layout) -> Schedule:
    """Appends each block's gradient reduction to the programs of all its holders, then ``STEP``.

    Also for holders without a microbatch (their gradient is zero) and for single holders. Everybody keeps
    to one order of all blocks, so these blocking collectives cannot wait for each other in a circle.
    """
    tails: dict[int, list[Instr]] = {worker: [] for worker in layout.workers}
    for block in reduction_order(layout):
        instr = Instr(Op.REDUCE_GRAD, first=block.first, last=block.last)
        for worker in block.holders:
            tails[worker].append(instr)
    programs = dict(schedule.programs)
    step = Instr(Op.STEP)
    return Schedule(
        programs=tuple((worker, (*programs.get(worker, ()), *tail, step)) for worker, tail in tails.items())
    )
