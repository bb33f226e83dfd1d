"""How unevenly experts are loaded in the runs that are named, for jobs whose experts are spread over ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from odyssey_megatron.cluster.state import ClusterState, with_expert_loads
from odyssey_megatron.metrics.journal import read_journal


def with_measured_loads(state: ClusterState, runs: Sequence[str]) -> tuple[ClusterState, tuple[str, ...]]:
    """Return ``state`` with the loads that the last fitting one of ``runs`` has measured last, and a sentence on them.

    A run fits if it has gangs of as many ranks, each with as many experts. Without gangs there is nothing to say.

    Args:
        runs: runs' folders, or the profiles in them.

    Raises:
        ConfigError: a journal cannot be read.
    """
    experts, whole = state.workers[0].experts, state.cell_size
    if not experts:
        return state, ()
    for run in reversed(runs):
        if found := _loads(run, experts, whole):
            (_, busiest), *smaller = sorted(found.items(), reverse=True)
            of_fewer = "".join(f", {load:.2f} times in one of {size}" for size, load in smaller)
            said = f"experts are loaded as {run} has measured: the busiest rank of a gang of {whole} gets {busiest:.2f}"
            return with_expert_loads(state, found), (f"{said} times the mean of tokens{of_fewer}",)
    that = f"of gangs of {whole} ranks with {experts} expert(s) each"
    why = (
        f"no run that is named has measured those {that}"
        if runs
        else f"--fit takes what a run {that} has measured"
    )
    return state, (f"experts are taken to be evenly loaded: {why}",)


def _loads(run: str, experts: int, whole: int) -> dict[int, float]:
    """Return number of ranks -> tokens of the busiest one, as in ``cluster/expert_loads.py``; empty: not measured."""
    found: dict[int, float] = {}
    for event in read_journal(run if os.path.isdir(run) else Path(run).parent, only=("expert_loads",)):
        loads = dict(event.get("loads") or ())
        if event.get("experts") == experts and max(loads, default=0) == whole and min(loads.values()) > 0:
            found = loads
    return found
