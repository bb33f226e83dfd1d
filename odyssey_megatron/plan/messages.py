"""The passes that lower a compute order to what the interpreter runs."""

from __future__ import annotations

from collections import defaultdict, deque

from odyssey_megatron.plan.layout import Block, Layout
from odyssey_megatron.plan.visits import (
    FORWARD,
    NEEDS,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    WEIGHT_GRAD,
    Codes,
    Visits,
)

Channels = dict[tuple[int, int, bool], deque[int]]
"""(sender, receiver, upwards?) -> the receives that its messages need, in the order in which they are sent."""


def with_messages(programs: Codes, visits: Visits) -> Codes:
    """Inserts sends right after their producer and receives one compute instruction before their consumer.

    Sends do not block, and receives are only posted: the consumer waits. So the one thing that order
    decides is matching: a channel (sender, receiver, kind) is FIFO, as NCCL's are. The receiver may consume
    in another order than the sender produces; then it posts the receives of the messages in between early,
    in the sender's order.
    """
    channels: Channels = defaultdict(deque)
    sending = {worker: _with_sends(worker, program, visits, channels) for worker, program in programs.items()}
    return {worker: _with_receives(worker, program, visits, channels) for worker, program in sending.items()}


def _with_sends(worker: int, program: list[int], visits: Visits, channels: Channels) -> list[int]:
    before, behind = visits.before, visits.behind
    out: list[int] = []
    for code in program:
        out.append(code)
        visit, kind = code >> 3, code & 7
        if kind == FORWARD:
            if (peer := behind[visit]) >= 0:
                out.append(visit * 8 + SEND_FORWARD)
                channels[worker, peer, False].append((visit + 1) * 8 + RECV_FORWARD)
        elif kind != WEIGHT_GRAD and (peer := before[visit]) >= 0:
            out.append(visit * 8 + SEND_BACKWARD)
            channels[worker, peer, True].append((visit - 1) * 8 + RECV_BACKWARD)
    return out


def _with_receives(worker: int, program: list[int], visits: Visits, channels: Channels) -> list[int]:
    before, behind = visits.before, visits.behind
    out: list[int] = []
    early: set[int] = set()  # receives posted before the instruction in front of their consumer
    previous = 0  # where the compute instruction before the current one stands in ``out``
    for code in program:
        visit, kind = code >> 3, code & 7
        if kind >= SEND_FORWARD:
            out.append(code)
            continue
        peer = before[visit] if kind == FORWARD else behind[visit] if kind != WEIGHT_GRAD else -1
        needed, here = code + NEEDS[kind], len(out)
        if peer >= 0 and needed not in early:
            queue = channels[peer, worker, kind != FORWARD]
            posts = [queue.popleft()]
            while posts[-1] != needed:
                posts.append(queue.popleft())
            early.update(posts[:-1])
            out[previous:previous] = posts
            here += len(posts)
        out.append(code)
        previous = here
    return out


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


def with_reductions(programs: Codes, visits: Visits) -> Codes:
    """Appends each block's gradient reduction to the programs of all its holders, then ``STEP``.

    Also for holders without a microbatch (their gradient is zero) and for single holders. Everybody keeps
    to one order of all blocks, so these blocking collectives cannot wait for each other in a circle.
    """
    whole = {worker: list(programs.get(worker, ())) for worker in visits.layout.workers}
    codes = {block.first: code for code, block in enumerate(visits.blocks, visits.reductions)}
    for block in reduction_order(visits.layout):
        for worker in block.holders:
            whole[worker].append(codes[block.first])
    for program in whole.values():
        program.append(visits.step)
    return whole
