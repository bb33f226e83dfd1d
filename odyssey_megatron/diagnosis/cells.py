"""Which rank of a slow cell the others wait for: by what each computes itself, without its waits in sums.

Ranks over which experts are spread compute unlike amounts, since some experts get more tokens than others. So each is
compared with the ranks in its place in other cells that compute the same layers, where there are any.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
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
    layers: tuple[tuple[int, int], ...]
    """The spans of layers that it computed, ascending."""
    computed_s: float
    """Time of all these. If taken by events on a GPU it is the same on all ranks of a cell, as it includes their
    sums.
    """
    probe_s: float
    """Time of a product of matrices that is the same on all ranks, and that each computes by itself."""


def with_ranks(
    diagnosis: Diagnosis, rows: Iterable[OwnWork], cell_size: int, *, spreads_experts: bool = False
) -> Diagnosis:
    """Return ``diagnosis`` with the ranks by which slow cells are slow, where these can be told.

    ``spreads_experts``: what the ranks of a cell compute is not alike by itself.
    """
    slow = diagnosis.slow
    if cell_size == 1 or not slow:
        return diagnosis
    by_cell: dict[int, list[OwnWork]] = {}
    for one in sorted(rows, key=lambda row: row.step):
        by_cell.setdefault(one.rank // cell_size, []).append(one)
    healthy = {cell: own for cell, own in by_cell.items() if cell not in slow}
    verdicts = []
    for verdict in diagnosis.verdicts:
        own = by_cell.get(verdict.worker, [])
        own = [one for one in own if one.layers == own[-1].layers]
        usual_s = _usual_s(own, healthy, cell_size)
        for times, what in (
            (_computed(own, usual_s, cell_size, spreads_experts), "what each computes itself"),
            (_levels((one.rank, one.probe_s) for one in own), "a product that is the same on all"),
        ):
            if found := _apart(times):
                listed = ", ".join(f"{rank} ({factor:.2f} times as long)" for rank, factor in found.items())
                evidence = f"{verdict.evidence}; the others of its cell wait for rank(s) {listed}, by {what}"
                verdict = replace(verdict, ranks=tuple(found), evidence=evidence)
                break
        verdicts.append(verdict)
    return replace(diagnosis, verdicts=tuple(verdicts))


def _computed(
    own: Sequence[OwnWork], usual_s: Mapping[int, float], cell_size: int, spreads_experts: bool
) -> dict[int, float]:
    """Return, for each rank of ``own``, its time relative to ``usual_s`` of its place in the cell, or in seconds where
    no other cell computes the same. Empty where times of different places say nothing about ranks.
    """
    levels_s = _levels((one.rank, one.computed_s) for one in own)
    if all(usual_s.get(rank % cell_size, 0.0) > 0 for rank in levels_s):
        return {rank: level_s / usual_s[rank % cell_size] for rank, level_s in levels_s.items()}
    return {} if spreads_experts else levels_s


def _usual_s(
    own: Sequence[OwnWork], healthy: Mapping[int, Iterable[OwnWork]], cell_size: int
) -> dict[int, float]:
    """Return place -> the median of what ranks there compute in cells that have as many ranks as that of ``own``, and
    its layers.
    """
    of_place: dict[int, list[float]] = {}
    places = {one.rank % cell_size for one in own}
    for rows in healthy.values() if own else ():
        alike = [one for one in rows if one.layers == own[-1].layers]
        levels_s = _levels((one.rank % cell_size, one.computed_s) for one in alike)
        if levels_s.keys() == places:
            for place, level_s in levels_s.items():
                of_place.setdefault(place, []).append(level_s)
    return {place: statistics.median(levels_s) for place, levels_s in of_place.items()}


def _levels(times: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return rank -> the median of its last times, without ranks that have computed nothing."""
    by_rank: dict[int, list[float]] = {}
    for rank, seconds in times:
        by_rank.setdefault(rank, []).append(seconds)
    return {rank: statistics.median(of[-RECENT:]) for rank, of in by_rank.items() if any(of)}


def _apart(levels: Mapping[int, float]) -> dict[int, float]:
    """Return, for each rank that stands out, how many times as long it takes as the faster half of its cell.

    Empty if all of them stand out, which cannot be.
    """
    if len(levels) < 2:
        return {}
    usual = statistics.median_low(levels.values())
    found = {rank: level / usual for rank, level in sorted(levels.items()) if level >= _APART * usual > 0}
    return found if len(found) < len(levels) else {}
