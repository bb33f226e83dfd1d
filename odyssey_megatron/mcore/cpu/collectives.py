"""Collectives that spread experts need and gloo lacks: with parts of unequal size, or with sizes given as tensors.

Megatron converts such sizes to lists only if they are on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Replace torch's functions; must be called only once."""
    dist.all_gather = _all_gather(dist.all_gather)
    dist.reduce_scatter = _reduce_scatter(dist.reduce_scatter)
    dist.all_to_all_single = _all_to_all_single(dist.all_to_all_single)


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({one.shape for one in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        for index, one in enumerate(tensor_list):
            if index == dist.get_rank(group):
                one.copy_(tensor)
            dist.broadcast(one, group=group, group_src=index)
        return None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({one.shape for one in input_list}) == 1:
            return original(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat(input_list)
        dist.all_reduce(whole, op=op, group=group)
        first = sum(len(one) for one in input_list[: dist.get_rank(group)])
        output.copy_(whole[first : first + len(output)])
        return None

    return reduce_scatter


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = [
            one.tolist() if isinstance(one, torch.Tensor) else one
            for one in (output_split_sizes, input_split_sizes)
        ]
        return original(output, input, *sizes, group=group, async_op=async_op)

    return all_to_all_single
