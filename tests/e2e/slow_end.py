"""The example, whose last step waits a moment on all ranks: there is time to shoot at it.

A file in the run folder says that some rank is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))

import pretrain_llama

from odyssey_megatron.execute.rank import RankRuntime

WAITS_S = 0.4


def marker(run_dir: str | Path) -> Path:
    return Path(run_dir) / "last-step"


def main() -> None:
    args, run_step = pretrain_llama.parse_arguments(), RankRuntime.run_step

    def slow_at_the_end(rank: RankRuntime, generation: Any) -> None:
        if rank.committed == args.train_iters - 1:
            marker(args.odyssey_run_dir).touch()
            time.sleep(WAITS_S)
        run_step(rank, generation)

    RankRuntime.run_step = slow_at_the_end
    pretrain_llama.main()


if __name__ == "__main__":
    main()
