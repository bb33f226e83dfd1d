"""A script, the example if none is named, on hardware that makes numbers which are not finite.

``--not-finite 1:2:forward``: rank 1, from step 2 on, in each forward; or in ``input_grad``, ``weight_grad``.
``1:2:forward:once``: in one of them. ``all:2:forward``: of microbatch 3, on whichever rank. ``0:2:dies``: rank 0,
when it begins step 2 for the second time. Several are separated by commas.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from odyssey_megatron.mcore.model.model import MegatronModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama" / "pretrain_llama.py"
MICROBATCH = 3


class Fault:
    """NaN in a weight while the wrapped method of ``model.compute`` runs, and in a gradient behind ``weight_grad``."""

    def __init__(self, model: Any, where: str, step: int, *, microbatch: int | None, once: bool):
        self._model, self._where, self._step, self._once = model, where, step, once
        self._microbatch, self._original = microbatch, getattr(model.compute, where)
        setattr(model.compute, where, self._run)

    def _run(self, microbatch: int, first: int, last: int, *args: Any, **kwargs: Any) -> Any:
        at = self._model.microbatches.step >= self._step and self._microbatch in (None, microbatch)
        if not at or kwargs.get("ahead") or not self._model.compute._training:
            return self._original(microbatch, first, last, *args, **kwargs)
        if self._once:
            self._step = sys.maxsize
        weight = next(one for one in self._model.holdings.held[last - 1].weights().values() if one.dim() > 1)
        number = weight.data.view(-1)[0].clone()
        weight.data.view(-1)[0] = float("nan")
        result = self._original(microbatch, first, last, *args, **kwargs)
        weight.data.view(-1)[0] = number
        if self._where == "weight_grad":
            next(self._model.holdings.held[last - 1].parameters()).main_grad.view(-1)[0] = float("nan")
        return result


def die_where_it_is_begun_again(model: Any, step: int) -> None:
    begin, begun = model.begin_step, list[int]()

    def begin_step(number: int) -> None:
        if number == step and number in begun:
            os.kill(os.getpid(), signal.SIGKILL)
        begun.append(number)
        begin(number)

    model.begin_step = begin_step


def main() -> None:
    at = sys.argv.index("--not-finite")
    faults = [one.split(":") for one in sys.argv[at + 1].split(",")]
    del sys.argv[at : at + 2]
    initialize, rank = MegatronModel.__init__, os.environ["RANK"]

    def initialize_broken(model: Any, *args: Any, **kwargs: Any) -> None:
        initialize(model, *args, **kwargs)
        for who, step, where, *rest in faults:
            if who not in ("all", rank) or os.environ.get("ODYSSEY_INCARNATION", "0") != "0":
                continue
            if where == "dies":
                die_where_it_is_begun_again(model, int(step))
            else:
                one = MICROBATCH if who == "all" else None
                Fault(model, where, int(step), microbatch=one, once=bool(rest))

    MegatronModel.__init__ = initialize_broken  # type: ignore[method-assign]
    script = sys.argv.pop(1) if sys.argv[1].endswith(".py") else str(EXAMPLE)
    sys.argv[0] = script
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
