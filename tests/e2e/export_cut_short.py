"""The example, with a rank that dies when all steps are trained: while it writes weights, or after that."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))

import pretrain_llama

from odyssey_megatron.mcore.plugin import Session

RANK = 0


def main() -> None:
    late = "--late" in sys.argv
    if late:
        sys.argv.remove("--late")
    save, train = pretrain_llama.save_weights, Session.train

    def die() -> None:
        if int(os.environ["RANK"]) == RANK:
            os.kill(os.getpid(), signal.SIGKILL)

    def save_half(folder: Path, model: Any) -> None:
        if int(os.environ["RANK"]) == RANK:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "layer_000.unfinished").write_bytes(b"half")
            die()
        save(folder, model)

    def train_and_die(session: Session, *args: Any) -> Any:
        train(session, *args)
        die()

    if late:
        Session.train = train_and_die  # type: ignore[method-assign, assignment]
    else:
        pretrain_llama.save_weights = save_half
    pretrain_llama.main()


if __name__ == "__main__":
    main()
