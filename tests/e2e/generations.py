"""The example with many generations: in some steps, whoever speaks asks for fresh groups.

Quiet steps in between are slow, so that the groups of earlier generations get time to end; some steps before the end of
each such time a file tells the test to look at the processes. Another file, of the test, ends the last one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))

import pretrain_llama

from odyssey_megatron.mcore.plugin import Session

QUIET = (range(4, 24), range(46, 116))
STEPS, SLOW_S = 116, 0.25


def marker(run_dir: str | Path, quiet: range) -> Path:
    return Path(run_dir) / f"quiet{quiet.start}"


def seen(run_dir: str | Path) -> Path:
    return Path(run_dir) / "seen"


def main() -> None:
    sessions: list[Session] = []
    train = Session.train

    def remember(session: Session, job: Any) -> Any:
        sessions.append(session)
        return train(session, job)

    def after_step(train_iters: int, step: int, outcome: Any) -> None:
        (session,) = sessions
        run_dir = session.config.run_dir
        for quiet in QUIET:
            if step in quiet:
                if not seen(run_dir).exists():
                    time.sleep(SLOW_S)
                if step == quiet.start + 17:
                    marker(run_dir, quiet).touch()
                return
        session.member.reports.ask_retry(
            session.member._watch.newest()[0], "the test wants another generation"
        )

    Session.train, pretrain_llama.print_step = remember, after_step
    pretrain_llama.main()


if __name__ == "__main__":
    main()
