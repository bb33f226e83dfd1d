"""The example on hardware that computes wrongly: after a step one bit of a rank's optimizer state is another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))

import pretrain_llama

from odyssey_megatron.mcore.plugin import Session

RANK, STEP = 5, 2


def main() -> None:
    import torch

    build = Session._model

    def build_broken(session: Session, *args: Any) -> Any:
        model = build(session, *args)
        apply = model.apply

        def apply_wrongly(*args: Any) -> Any:
            outcome = apply(*args)
            if (session.rank, model._step) == (RANK, STEP):
                optimizer = next(one.optimizer for _, one in sorted(model._held.items()) if one.optimizer)
                average = next(one for one in optimizer.state_tensors().values() if one.dim())
                average.view(torch.int64).view(-1)[0] ^= 1
            return outcome

        model.apply = apply_wrongly
        return model

    Session._model = build_broken  # type: ignore[method-assign]
    pretrain_llama.main()


if __name__ == "__main__":
    main()
