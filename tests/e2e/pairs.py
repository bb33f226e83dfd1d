"""The example's job with one group for each (sender, receiver), as on NCCL, which knows no tags."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from odyssey_megatron.execute import rank
from odyssey_megatron.execute.rank import RankRuntime
from tests.e2e.jobs import SCRIPT


def without_tags(**given: Any) -> RankRuntime:
    return RankRuntime(**{**given, "tagged_messages": False})


if __name__ == "__main__":
    rank.RankRuntime = without_tags  # type: ignore[assignment,misc]
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")
