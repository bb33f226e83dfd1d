"""The example on ranks that, asked for room for a layer, have none for its momentum: as in a differing installation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))

import pretrain_llama

from odyssey_megatron.mcore.plugin import Session


def main() -> None:
    build = Session._model

    def build_with_less(session: Session, *args: Any) -> Any:
        model = build(session, *args)
        room = model.transfer.tensors_to_fill
        model.transfer.tensors_to_fill = lambda layer, part, *span: {
            name: one
            for name, one in room(layer, part, *span).items()
            if not name.endswith("momentum_buffer")
        }
        return model

    Session._model = build_with_less  # type: ignore[method-assign]
    pretrain_llama.main()


if __name__ == "__main__":
    main()
