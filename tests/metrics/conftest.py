from __future__ import annotations

from pathlib import Path

import pytest

from odyssey_megatron.metrics import journal

from .synthetic_run import Clock, SyntheticRun


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Folders of the same synthetic run, ``shot_at`` and ``undisturbed``."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("shot_at", "undisturbed"):
            clock = Clock()
            patch.setattr(journal, "time", clock)
            SyntheticRun(folder / name, clock, with_failures=name == "shot_at").write()
    return {one.name: one for one in folder.iterdir()}
