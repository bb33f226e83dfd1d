"""Decides which GPU of a node ``odyssey readmit`` means, and says what becomes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from odyssey_megatron.errors import ConfigError


class Readmitted(NamedTuple):
    """A rank that starts on a GPU that works again."""

    rank: int
    slot: int
    """The number of the GPU on its node."""
    says: str
    """What is to be expected, in sentences for people."""


def slot_of(rank: int, gpu: int | None, given_up: Mapping[int, int], state: str) -> int:
    """Return the number of the GPU that is meant by a rank that was given up there.

    Args:
        rank: The rank that was given up.
        gpu: The number of the GPU on the node. None: there is only one on which ``rank`` was given up.
        given_up: GPU -> the rank that was given up there, of one node.
        state: What to say of ``rank`` if it was not given up, for example "rank 3 is alive".

    Raises:
        ConfigError: It was not given up there, or on several GPUs.
    """
    slots = sorted(slot for slot, who in given_up.items() if who == rank)
    here = ", ".join(f"rank {who} on GPU {slot}" for slot, who in sorted(given_up.items())) or "no rank"
    if not slots:
        raise ConfigError(f"{state}, and was not given up. Given up on its node: {here}.")
    if gpu is None and len(slots) > 1:
        raise ConfigError(
            f"rank {rank} was given up on {len(slots)} GPUs of its node, {', '.join(map(str, slots))}: say with --gpu "
            "which of them works again."
        )
    if gpu is not None and gpu not in slots:
        raise ConfigError(f"rank {rank} was not given up on GPU {gpu}. Given up on its node: {here}.")
    return slots[0] if gpu is None else gpu


def outlook(rank: int, cell: Sequence[int], *, before: int, now: int, lacks: int) -> str:
    """Return what becomes of ``rank``, which is started on a GPU that works again.

    Args:
        cell: All ranks of its whole cell.
        before: The number of ranks with which its cell trains as a smaller one; 0: it waits for others.
        now: The number of ranks with which it comes back when it next starts; 0: it still waits.
        lacks: The number of ranks that it still lacks.
    """
    who = f"its cell, ranks {cell[0]} to {cell[-1]},"
    joins = "is filled while the others train, and joins them between two steps."
    if len(cell) == 1:
        return f"It {joins}"
    if not lacks and before:
        return f"With it {who} is whole: it leaves between two steps, and comes back with {len(cell)} ranks."
    if not lacks:
        return f"With it {who} is whole: it {joins}"
    if before:
        return f"It stands by: {who} trains with {before} ranks until it lacks none, and still lacks {lacks}."
    if rank - cell[0] < now:
        return f"With it {who} is a smaller one of {now} of {len(cell)} ranks: it {joins}"
    return f"It stands by: {who} still lacks {lacks} of {len(cell)} ranks."
