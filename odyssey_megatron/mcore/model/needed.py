"""Announces in a forward which layer computes next, as its weights may still be on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from odyssey_megatron.execute.interpreter import Needs

_needs: Needs = None


@contextlib.contextmanager
def asking(needs: Needs) -> Iterator[None]:
    """The body is a forward that calls ``needs`` before each layer; recomputation in a backward does not."""
    global _needs
    _needs = needs
    try:
        yield
    finally:
        _needs = None


def watch(modules: Iterable[torch.nn.Module], layers: tuple[int, ...]) -> None:
    """Announce these ``layers`` before any of the ``modules`` computes with their weights."""

    def begins(module: torch.nn.Module, args: Any) -> None:
        if _needs is not None:
            for layer in layers:
                _needs(layer)

    for module in modules:
        module.register_forward_pre_hook(begins)
