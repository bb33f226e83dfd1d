"""Which transformer layers a model chunk is built of.

Megatron asks two functions how many layers a stage has and how many come before it, and both answer from one layout for
the whole model. Here they answer for the span being built, so that the user's own ``model_provider`` builds any run of
layers. For a hybrid model another function is asked which kinds the layers are of.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.upstream import compat, seams
from odyssey_megatron.upstream.hybrid_seams import HYBRID_SEAMS
from odyssey_megatron.upstream.seam_table import GET_NUM_LAYERS_TO_BUILD, GET_TRANSFORMER_LAYER_OFFSET

_current: tuple[int, int] | None = None


@contextlib.contextmanager
def building(offset: int, count: int) -> Iterator[None]:
    """In the body a chunk is built of ``count`` transformer layers, with ``offset`` layers before it."""
    global _current
    before, _current = _current, (offset, count)
    try:
        yield
    finally:
        _current = before


@dataclass(frozen=True, slots=True)
class MegatronSplit:
    """How Megatron itself cuts the model: for each virtual stage, the number of transformer layers in each stage."""

    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        config: Any,
        stages: int,
        virtual_stages: int | None,
        layout: str | None,
        segments: Sequence[str] = (),
    ) -> MegatronSplit:
        """The split that Megatron makes of these arguments.

        ``virtual_stages``: the number of chunks of a stage, None for one; ``layout``:
        ``--pipeline-model-parallel-layout``; ``segments``: the layers of all chunks, where a hybrid pattern says where
        one ends.
        """
        if len(segments) > 1:
            counts = [len(one) for one in segments]
            return cls(tuple(tuple(counts[at : at + stages]) for at in range(0, len(counts), stages)))
        if layout is not None:
            kinds = PipelineParallelLayerLayout(layout, stages).layout
            chunks = [[kind.name for kind in chunk] for stage in kinds for chunk in stage]
            if any("mtp" in chunk and "loss" not in chunk for chunk in chunks):
                raise ConfigError(
                    f"--pipeline-model-parallel-layout {layout} has multi-token prediction (m) in another chunk than "
                    "the loss (L), with which it goes under --odyssey. Put it into the last stage."
                )
            return cls(
                tuple(
                    tuple(
                        sum(kind.name == "decoder" for kind in kinds[stage][row]) for stage in range(stages)
                    )
                    for row in range(virtual_stages or 1)
                )
            )
        config = copy.copy(config)
        config.virtual_pipeline_model_parallel_size = virtual_stages
        count = seams.original(GET_NUM_LAYERS_TO_BUILD)
        rows = range(virtual_stages) if virtual_stages else (None,)
        return cls(tuple(tuple(count(config, row, stage) for stage in range(stages)) for row in rows))

    def chunks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each stage, the planner layers [first, last) of its chunks, in the order in which it builds them."""
        ends = accumulate((count for row in self.counts for count in row), initial=1)
        spans = [list(span) for span in pairwise(ends)]
        spans[0][0], spans[-1][1] = 0, spans[-1][1] + 1
        stages = len(self.counts[0])
        return tuple(tuple((first, last) for first, last in spans[stage::stages]) for stage in range(stages))

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """The number of transformer layers of each stage, in all its chunks."""
        return tuple(map(sum, zip(*self.counts, strict=True)))


def install() -> None:
    """Install the seams; a second call does nothing. Raises MegatronIncompatible."""
    for seam, which in ((GET_TRANSFORMER_LAYER_OFFSET, 0), (GET_NUM_LAYERS_TO_BUILD, 1)):
        if not seams.is_applied(seam):
            seams.wrap(seam, functools.partial(_answer, which))


def install_hybrid() -> None:
    """Install the seams for the layers of a hybrid pattern."""
    for seam in HYBRID_SEAMS:
        if not seams.is_applied(seam):
            seams.wrap(seam, _answer_kinds)


def _answer_kinds(original: Any, *args: Any, **kwargs: Any) -> Any:
    return (
        original(*args, **kwargs)
        if _current is None
        else compat.kinds_of_chunk(original, *_current, *args, **kwargs)
    )


def _answer(which: int, original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) if _current is None else _current[which]
