"""The example on hardware that computes wrongly: one bit of a rank's memory changes behind a step, by which a number
becomes another one by 2^-8 of it: what is right within 1e-10 has not been made with it.

``--corrupt 5:2:state,...``: rank 5, behind step 2, in its optimizer state; or in its ``weights``; or in some that
it was ``sent``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))

import pretrain_llama

from odyssey_megatron.cluster.shapes import ONE
from odyssey_megatron.mcore.model.flat import ranges
from odyssey_megatron.mcore.plugin import Session
from odyssey_megatron.plan.placing.slices import EVERYTHING, without


def main() -> None:
    import torch

    at = sys.argv.index("--corrupt")
    faults = [one.split(":") for one in sys.argv[at + 1].split(",")]
    del sys.argv[at : at + 2]
    build = Session._model

    def build_broken(session: Session, *args: Any) -> Any:
        model = build(session, *args)
        apply, odd_holders = model.end.apply, model.holdings.odd_holders

        def hit(*kinds: str) -> None:
            for rank, step, what in faults:
                if (session.rank, model.microbatches.step) != (int(rank), int(step)) or what not in kinds:
                    continue
                held = next(one for _, one in sorted(model.holdings.held.items()))
                tensors = held.optimizer.state_tensors() if what == "state" else held.weights()
                tensor, at = next(one for one in tensors.values() if one.dim()), 0
                if what == "sent":  # by the owners of slices that this rank does not keep
                    others = without([EVERYTHING], held.optimizer.spans)
                    one = next(ranges(held, ONE, others))
                    tensor, at = one.parameter, one.start
                tensor.data.view(torch.int64).view(-1)[at] ^= 1 << 44

        def apply_wrongly(*args: Any) -> Any:
            outcome = apply(*args)
            hit("weights", "state")
            return outcome

        def compare_others(*args: Any, **kwargs: Any) -> Any:
            hit("sent")
            return odd_holders(*args, **kwargs)

        model.end.apply, model.holdings.odd_holders = apply_wrongly, compare_others
        return model

    Session._model = build_broken  # type: ignore[method-assign]
    pretrain_llama.main()


if __name__ == "__main__":
    main()
