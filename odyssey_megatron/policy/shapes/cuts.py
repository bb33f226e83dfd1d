"""Where a pipeline is cut into stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from odyssey_megatron.policy.shapes.ways import ONCE, Way, window


def recut(
    work: Sequence[float], capacity: Sequence[float], ends: tuple[int, ...], way: Way = ONCE
) -> tuple[int, ...]:
    """Return new stage ends with the least maximum of work / capacity, and among those the least movement.

    Each stage has at least one transformer layer. ``work`` is in the order of
    :func:`odyssey_megatron.policy.shapes.ways.in_turn`.
    """
    last, stages = len(work), len(ends)
    sums = [0.0, *accumulate(work)]
    limit = _least_limit(sums, capacity, ends, way)
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    for stage in range(stages):
        low, high = window(stage, stages, last, way)
        reached: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        for start, (slowest, moved, path) in best.items():
            for end in range(max(low, start + 1), high + 1):
                load = (sums[end] - sums[start]) / capacity[stage]
                if load > limit:
                    break
                load = round(load / limit, 9)  # values that are equal on paper must compare equal
                option = (max(slowest, load), moved + abs(end - ends[stage]), (*path, end))
                if end not in reached or option < reached[end]:
                    reached[end] = option
        best = reached
    return best[last][2] if last in best else ends


def _least_limit(sums: Sequence[float], capacity: Sequence[float], ends: tuple[int, ...], way: Way) -> float:
    """Return the least maximum of work / capacity, to nine digits, so that loads that are equal on paper are within it.

    It is bisected; filling the stages greedily shows whether a limit is enough.
    """
    last, stages = len(sums) - 1, len(ends)

    def enough(limit: float) -> bool:
        start = 0
        for stage in range(stages):
            low, high = window(stage, stages, last, way)
            room = sums[start] + limit * capacity[stage]
            if sums[low] > room:
                return False
            start = min(high, bisect_right(sums, room) - 1)
        return start == last

    spans = pairwise((0, *ends))
    most = max((sums[b] - sums[a]) / capacity[i] for i, (a, b) in enumerate(spans)) * (1 + 1e-9)
    least = 0.0
    while most - least > 1e-10 * most:
        middle = (least + most) / 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return most * (1 + 1e-9)


def place_within(
    plain_s: Sequence[Sequence[float]],
    slow_s: Sequence[Sequence[float]],
    windows: Sequence[tuple[int, int]],
    limit: float,
) -> int:
    """Return the last stage that may have a slow worker such that no stage takes longer than ``limit``; -1 if there is
    none.

    Stages before it take as many layers as they can from the top, and those behind it from the bottom.

    Args:
        plain_s, slow_s: ``[first][last]``, the time of a stage of these layers on a healthy worker, and on the slow
        one.
        windows: for each stage, the range in which it may end.
    """
    reach = [0]
    for low, high in windows[:-1]:
        end = min(high, bisect_right(plain_s[reach[-1]], limit, lo=reach[-1] + 1) - 1)
        if end < low:
            break
        reach.append(end)
    start = windows[-1][1]
    for place in range(len(windows) - 1, -1, -1):
        if place < len(reach) and slow_s[min(reach[place], start - 1)][start] <= limit:
            return place
        if place == 0:
            break
        low, high = windows[place - 1]
        end, start = start, min(high, start - 1)
        if plain_s[start][end] > limit:
            break
        while start > low and plain_s[start - 1][end] <= limit:
            start -= 1
    return -1
