"""A process group of one rank, in which the rank receives what it sends.

torch's own group without connections (``fake``) does that for all operations only from 2.13 on. In 2.11 a scatter, an
all-to-all and a reduce-scatter leave their outputs as they were.
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
    """A group of one rank. Its operations are complete when they return; on a GPU, in the order of its stream."""

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
    with torch.no_grad():  # autograd does not see it where a communication library writes the output, either
        for output, own in zip(_tensors(outputs), _tensors(inputs), strict=True):
            output.copy_(own.reshape(output.shape))
    return _Done()


def _nobody(name: str) -> Callable[..., Any]:
    def operation(self: Alone, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{name} in a group of one rank: there is no other.")

    return operation


for _name in OPERATIONS:
    setattr(Alone, _name, _keep if _name in _IN_PLACE else _nobody(_name) if _name in _TO_OTHERS else _copy)
