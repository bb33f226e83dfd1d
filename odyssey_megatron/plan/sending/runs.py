"""Lists of whole numbers as short text: ``0-3,7,8-128:40`` is 0, 1, 2, 3, 7, 8, 48, 88, 128."""

from __future__ import annotations

from collections.abc import Sequence

_PAYS = 3
"""The least number of numbers that are shorter as a run than one by one."""


def to_runs(numbers: Sequence[int]) -> str:
    """Return the text of ``numbers``, in their order. None of them is negative."""
    parts, at, count = [], 0, len(numbers)
    while at < count:
        first, end = numbers[at], at + 1
        step = numbers[end] - first if end < count else 0
        if step > 0:
            follows = first + step
            while end < count and numbers[end] == follows:
                follows += step
                end += 1
        if end - at < _PAYS:
            parts.append(str(first))
            at += 1
            continue
        parts.append(f"{first}-{numbers[end - 1]}" + (f":{step}" if step > 1 else ""))
        at = end
    return ",".join(parts)


def from_runs(text: str) -> tuple[int, ...]:
    """Return the numbers of which ``text`` is the :func:`to_runs`. Raises ValueError."""
    numbers: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, rest = part.partition("-")
        last, _, step = rest.partition(":")
        numbers += range(int(first), int(last) + 1, int(step or 1)) if dash else [int(first)]
    return tuple(numbers)
