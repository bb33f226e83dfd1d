"""How unlike the work of ranks is that have experts spread over them: some experts get more tokens than others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from odyssey_megatron.cluster.cell import Cell


def expert_loads(whole: Cell, tokens: Sequence[Sequence[float]]) -> dict[int, float]:
    """Return how many tokens the busiest rank of a gang gets, for each number of ranks that the gang may have.

    Args:
        whole: A rank's place in a whole gang.
        tokens: For each layer that has experts, the number of tokens of each expert.

    Returns:
        Number of ranks -> the tokens of the busiest one, relative to the mean of a whole gang's ranks. All ranks of a
        gang wait for its busiest one in each layer, so this is a mean over layers.
    """
    sums = [[0.0, *accumulate(row)] for row in tokens]
    total = sum(row[-1] for row in sums)
    sizes = [whole.size // each for each in whole.divisions(tensor=False)]
    found = {}
    for size in (*sizes, *whole.uneven_sizes) if total > 0 else ():
        held = {cell.held_experts for cell in whole.of_worker(0, size)}
        busiest = sum(max(row[own.stop] - row[own.start] for own in held) for row in sums)
        found[size] = busiest * whole.full_expert / total
    return found
