"""Which rank of a slow cell the others wait for: by what each computes itself, without what it waits for in sums."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from odyssey_megatron.diagnosis.change import RECENT
from odyssey_megatron.diagnosis.verdicts import Diagnosis

_APART = 1.1
"""Of a rank that takes so many times what the others of its cell do: as much as makes a worker slow."""


@dataclass(frozen=True, slots=True)
class OwnWork:
    """Of one rank in one step."""

    step: int
    rank: int
    computed_s: float
    """All that its layers took. By events of a GPU that is the same on all ranks of a cell, as their sums are part of
    it.
    """
    probe_s: float
    """The product that is the same on all ranks, which is computed alone."""


def with_ranks(diagnosis: Diagnosis, rows: Iterable[OwnWork], cell_size: int) -> Diagnosis:
    """``diagnosis``, which says of slow cells whose ranks they are slow by."""
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
    """Rank -> so many times what the faster half of its cell takes, of those that stand out; not all of them can."""
    levels = {rank: statistics.median(of[-RECENT:]) for rank, of in times.items() if any(of)}
    if len(levels) < 2:
        return {}
    usual = statistics.median_low(levels.values())
    found = {rank: level / usual for rank, level in sorted(levels.items()) if level >= _APART * usual > 0}
    return found if len(found) < len(levels) else {}
