"""Zero-bubble V beside our schedules: what a user runs who wants no bubbles at 1F1B's memory.

Each worker has two chunks, the s-th and the s-th last, and its order is that of torch's ``ScheduleZBVZeroBubble``
(Qi et al., arXiv 2401.10241, section 6): nothing of it is ours. Sums of gradients are taken to be hidden, and so is the
optimizer; messages are not. :func:`summed_s` counts sums as ours are: beside the weight gradients that it ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from odyssey_megatron.plan.checking.simulate import step_end_s
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Hop, Route, layout_from_routes
from odyssey_megatron.plan.scheduling.reductions import Tail

Task = tuple[str, int, int]
"""(F, I or W, chunk, microbatch)"""


def orders(stages: int, microbatches: int) -> list[list[Task]]:
    """Of each worker, as torch has them."""
    from torch.distributed.pipelining import schedules

    sizes: Any = SimpleNamespace(pp_group_size=stages, _n_microbatches=microbatches, num_stages=2 * stages)
    kinds = {schedules.F: "F", schedules.I: "I", schedules.W: "W"}
    found = []
    for rank in range(stages):
        actions = schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(sizes, rank)
        found.append(
            [(kinds[one.computation_type], one.stage_index, one.microbatch_index) for one in actions if one]
        )
    return found


def chunks_of(costs: Costs, count: int) -> list[tuple[int, int]]:
    """Layers [first, last) of each, as even as can be; the embedding comes first, and the head last."""
    inner, ends = len(costs.layers) - 2, [0]
    ends += [1 + (chunk + 1) * inner // count for chunk in range(count - 1)]
    return [*zip(ends, [*ends[1:], len(costs.layers)], strict=True)]


def clock(
    programs: Sequence[Sequence[Task]], seconds: dict[tuple[str, int], float], lag_s: float, last: int
) -> tuple[list[tuple[float, float]], dict[Task, float]]:
    """When each worker begins and ends, and when each task ends, if all run in their order and as soon as they can.

    A forward waits for that of the chunk before, an input gradient for that of the chunk behind (``last``: for
    its forward), ``lag_s`` longer where that is another worker's. Raises RuntimeError if they wait for ever.
    """
    done: dict[Task, float] = {}
    whose = {task[1]: worker for worker, program in enumerate(programs) for task in program}
    now, at, began = [0.0] * len(programs), [0] * len(programs), [-1.0] * len(programs)

    def needs(task: Task) -> Task | None:
        kind, chunk, microbatch = task
        if kind == "F":
            return ("F", chunk - 1, microbatch) if chunk else None
        if kind == "I":
            return ("I", chunk + 1, microbatch) if chunk < last else ("F", chunk, microbatch)
        return ("I", chunk, microbatch)

    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(programs):
            while at[worker] < len(program):
                task = program[at[worker]]
                before = needs(task)
                if before is not None and before not in done:
                    break
                ready_s = 0.0
                if before is not None:
                    ready_s = done[before] + lag_s * (whose[before[1]] != worker)
                start_s = max(now[worker], ready_s)
                began[worker] = start_s if began[worker] < 0 else began[worker]
                now[worker] = done[task] = start_s + seconds[task[:2]]
                at[worker] += 1
                moved = True
    if any(i < len(program) for i, program in zip(at, programs, strict=True)):
        raise RuntimeError("the workers wait for each other for ever")
    return [*zip(began, now, strict=True)], done


def zb_v(costs: Costs, stages: int, microbatches: int) -> tuple[float, int]:
    """(step in seconds, bytes of activations on the worker that keeps most)."""
    chunks, programs = chunks_of(costs, 2 * stages), orders(stages, microbatches)
    peak = max(_peak(one, chunks, costs) for one in programs)
    return max(_done_s(costs, chunks, programs)), peak


def _done_s(
    costs: Costs, chunks: Sequence[tuple[int, int]], programs: Sequence[Sequence[Task]]
) -> list[float]:
    """When each worker has computed."""
    seconds, spans = dict[tuple[str, int], float](), costs.spans
    for chunk, (a, b) in enumerate(chunks):
        seconds |= {("F", chunk): spans.forward_s(a, b), ("I", chunk): spans.input_grad_s(a, b)}
        seconds["W", chunk] = spans.weight_grad_s(a, b)
    ends, _ = clock(programs, seconds, costs.message_s(), len(chunks) - 1)
    return [end_s for _, end_s in ends]


def summed_s(costs: Costs, stages: int, pipelines: int, microbatches: int) -> float:
    """The step of so many pipelines, with the sums over them."""
    chunks, programs = chunks_of(costs, 2 * stages), orders(stages, microbatches)
    routes, done_s, tails = list[Route](), dict[int, float](), dict[int, Tail]()
    of_stage = _done_s(costs, chunks, programs)
    for pipeline in range(pipelines):
        workers = [stage * pipelines + pipeline for stage in range(stages)]
        places = [*workers[:-1], workers[-1], *reversed(workers[:-1])]
        spans = [*chunks[: stages - 1], (chunks[stages - 1][0], chunks[stages][1]), *chunks[stages + 1 :]]
        hops = (Hop(worker=one, first=a, last=b) for one, (a, b) in zip(places, spans, strict=True))
        ids = tuple(range(pipeline, pipelines * microbatches, pipelines))
        routes.append(Route(microbatches=ids, hops=tuple(hops)))
        for worker, end_s, program in zip(workers, of_stage, programs, strict=True):
            last = takewhile(lambda task: task[0] == "W", reversed(program))
            done_s[worker] = end_s
            tails[worker] = Tail(tuple(chunks[chunk] for _, chunk, _ in reversed([*last])), 1.0, None)
    layout = layout_from_routes(len(costs.layers), tuple(routes), tied=costs.tied is not None)
    return step_end_s(layout, costs, done_s, tails)


def _peak(program: Sequence[Task], chunks: Sequence[tuple[int, int]], costs: Costs) -> int:
    live, peak = 0, 0
    for kind, chunk, _ in program:
        size = costs.spans.activation_bytes(*chunks[chunk])
        live += {"F": size, "I": 0, "W": -size}[kind]
        peak = max(peak, live)
    return peak
