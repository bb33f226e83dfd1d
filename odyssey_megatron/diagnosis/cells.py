"""Which rank of a slow cell the others wait for: by what each computes itself, without its waits in sums."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from odyssey_megatron.diagnosis.change import RECENT
from odyssey_megatron.diagnosis.verdicts import Diagnosis

_APART = 1.1
"""A rank stands out if it takes at least this many times as long as the others of its cell: as much as makes a worker
slow."""


@dataclass(frozen=True, slots=True)
class OwnWork:
    """What one rank computed in one step."""

    step: int
    rank: int
    computed_s: float
    """Time of all its layers. If taken by events on a GPU it is the same on all ranks of a cell, as it includes their
    sums.
    """
    probe_s: float
    """Time of a product of matrices that is the same on all ranks, and that each computes by itself."""


def with_ranks(diagnosis: Diagnosis, rows: Iterable[OwnWork], cell_size: int) -> Diagnosis:
    """Return ``diagnosis`` with the ranks by which slow cells are slow, where these can be told."""
    slow = diagnosis.slow
    if cell_size == 1 or not slow:
        return diagnosis
    computed: dict[int, dict[int, list[float]]] = {worker: {} for worker in slow}
    probed: dict[int, dict[int, list[float]]] = {worker: {} for worker in slow}
    for one in sorted(rows, key=lambda row: row.step):
        worker = one.rank // cell_size
        if worker in slow:
            computed[worker].setdefault(one.rank, []).append(one.computed_s)
            probed[worker].setdefault(one.rank, []).append(one.probe_s)
    verdicts = []
    for verdict in diagnosis.verdicts:
        who = verdict.worker
        for times, what in (
            (computed.get(who, {}), "what each computes itself"),
            (probed.get(who, {}), "a product that is the same on all"),
        ):
            if found := _apart(times):
                listed = ", ".join(f"{rank} ({factor:.2f} times as long)" for rank, factor in found.items())
                evidence = f"{verdict.evidence}; the others of its cell wait for rank(s) {listed}, by {what}"
                verdict = replace(verdict, ranks=tuple(found), evidence=evidence)
                break
        verdicts.append(verdict)
    return replace(diagnosis, verdicts=tuple(verdicts))


def _apart(times: Mapping[int, list[float]]) -> dict[int, float]:
    """Return, for each rank that stands out, how many times as long it takes as the faster half of its cell.

    Empty if all of them stand out, which cannot be.
    """
    levels = {rank: statistics.median(of[-RECENT:]) for rank, of in times.items() if any(of)}
    if len(levels) < 2:
        return {}
    usual = statistics.median_low(levels.values())
    found = {rank: level / usual for rank, level in sorted(levels.items()) if level >= _APART * usual > 0}
    return found if len(found) < len(levels) else {}
