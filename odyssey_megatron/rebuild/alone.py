"""The group of one rank: what it sends is what it gets.

torch's own group without connections does that for all operations from 2.13 on only; in 2.11 a scatter, an exchange and
a reduction into parts leave their outputs as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.rebuild.abort import OPERATIONS

_IN_PLACE = {"allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier"}
_TO_OTHERS = {"send", "recv", "recv_anysource"}


class Alone(dist.ProcessGroup):
    """Its operations are done when they are given: on a GPU, as far as its stream is concerned."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg] # its stub lacks this one

    def getBackendName(self) -> str:  # torch's name
        return "odyssey-alone"


class _Done(dist._Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return done


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for one in tree:
            yield from _tensors(one)


def _keep(self: Alone, *args: Any, **kwargs: Any) -> dist._Work:
    return _Done()


def _copy(self: Alone, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> dist._Work:
    with torch.no_grad():  # as where a library writes by itself
        for output, own in zip(_tensors(outputs), _tensors(inputs), strict=True):
            output.copy_(own.reshape(output.shape))
    return _Done()


def _nobody(name: str) -> Callable[..., Any]:
    def operation(self: Alone, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{name} in a group of one rank: there is no other.")

    return operation


for _name in OPERATIONS:
    setattr(Alone, _name, _keep if _name in _IN_PLACE else _nobody(_name) if _name in _TO_OTHERS else _copy)
