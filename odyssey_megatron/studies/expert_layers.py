"""Which layers have experts, by Megatron's ``--moe-layer-freq``."""

from __future__ import annotations

import ast

from odyssey_megatron.errors import ConfigError

MOST_LAYERS = 1000


def layers_with_experts(text: str, layers: int) -> list[int]:
    """Return the layers with experts, counted from 1.

    ``text`` is the interval between them, or a list of 0 and 1 as in ``([0]*3+[1]*58)``. Raises ConfigError.
    """
    try:
        found = _pattern(ast.parse(text, mode="eval").body)
        pattern = [at % found == 0 for at in range(layers)] if isinstance(found, int) else found
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        raise ConfigError(
            f"--moe-layer-freq {text[:40]}: a number, or a list like ([0]*3+[1]*58), is expected."
        ) from None
    if len(pattern) != layers:
        raise ConfigError(
            f"--moe-layer-freq {text[:40]} has {len(pattern)} layers, and --num-layers is {layers}."
        )
    return [layer for layer, has_them in enumerate(pattern, start=1) if has_them]


def _pattern(node: ast.expr) -> int | list[int]:
    """Return the value of numbers, lists of numbers, and sums and multiples of these.

    Nothing else is evaluated. Raises ValueError.
    """
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=found):
            return [one for one in map(_pattern, found) if isinstance(one, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            first, second = _pattern(left), _pattern(right)
            if isinstance(op, ast.Add) and isinstance(first, list) and isinstance(second, list):
                joined = first + second
            elif isinstance(op, ast.Mult) and isinstance(first, list) and isinstance(second, int):
                joined = first * min(second, MOST_LAYERS)
            else:
                raise ValueError
            if len(joined) > MOST_LAYERS:
                raise ValueError
            return joined
    raise ValueError
