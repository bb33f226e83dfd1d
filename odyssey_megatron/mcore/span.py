"""Which transformer layers a model chunk is built of, and stands for.

Megatron asks two functions how many layers a stage has and how many come before it, and they answer from one layout for
all. Here they answer for the span at hand, so that the user's own ``model_provider`` builds any run of layers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from odyssey_megatron.mcore import seams
from odyssey_megatron.mcore.seam_table import GET_NUM_LAYERS_TO_BUILD, GET_TRANSFORMER_LAYER_OFFSET

_current: tuple[int, int] | None = None


@contextlib.contextmanager
def building(offset: int, count: int) -> Iterator[None]:
    """In the body a chunk consists of ``count`` transformer layers, with ``offset`` of them before it."""
    global _current
    before, _current = _current, (offset, count)
    try:
        yield
    finally:
        _current = before


def megatron_stages(config: Any, pipeline_model_parallel_size: int) -> tuple[tuple[int, int], ...]:
    """The transformer layers [first, last) that Megatron itself would give to each stage, counted from 0."""
    count, offset = map(seams.original, (GET_NUM_LAYERS_TO_BUILD, GET_TRANSFORMER_LAYER_OFFSET))
    firsts = [offset(config, None, rank) for rank in range(pipeline_model_parallel_size)]
    return tuple((first, first + count(config, None, rank)) for rank, first in enumerate(firsts))


def install() -> None:
    """Puts the seams in; a second call does nothing. Raises MegatronIncompatible."""
    for seam, which in ((GET_TRANSFORMER_LAYER_OFFSET, 0), (GET_NUM_LAYERS_TO_BUILD, 1)):
        if not seams.is_applied(seam):
            seams.wrap(seam, functools.partial(_answer, which))


def _answer(which: int, original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) if _current is None else _current[which]
