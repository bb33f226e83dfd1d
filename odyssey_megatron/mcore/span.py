"""Which transformer layers a model chunk is built of, and stands for.

Megatron asks two functions how many layers a stage has and how many come before it, and they answer from one layout for
all. Here they answer for the span at hand, so that the user's own ``model_provider`` builds any run of layers.
Seams: megatron core_v0.16.1 core/transformer/transformer_block.py ``get_num_layers_to_build`` and
core/transformer/transformer_layer.py ``get_transformer_layer_offset``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from odyssey_megatron.errors import MegatronIncompatible

_current: tuple[int, int] | None = None
_originals: dict[str, Any] = {}


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
    count, offset = (_originals[name] for name in ("get_num_layers_to_build", "get_transformer_layer_offset"))
    firsts = [offset(config, None, rank) for rank in range(pipeline_model_parallel_size)]
    return tuple((first, first + count(config, None, rank)) for rank, first in enumerate(firsts))


def install() -> None:
    """Puts the seams in; a second call does nothing. Raises MegatronIncompatible if one is gone."""
    if _originals:
        return
    from megatron.core.transformer import transformer_block, transformer_layer

    for home, name, which in (
        (transformer_block, "get_num_layers_to_build", 1),
        (transformer_layer, "get_transformer_layer_offset", 0),
    ):
        original = getattr(home, name, None)
        if original is None:
            raise MegatronIncompatible(f"{home.__name__}.{name} is gone; tested with megatron-core 0.16.1.")
        _originals[name] = original
        _replace_everywhere(name, original, _answer(original, which))


def _answer(original: Any, which: int) -> Any:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _current is None else _current[which]

    return answer


def _replace_everywhere(name: str, original: Any, replacement: Any) -> None:
    for module in list(sys.modules.values()):
        if (
            getattr(module, "__name__", "").startswith("megatron.")
            and getattr(module, name, None) is original
        ):
            setattr(module, name, replacement)
