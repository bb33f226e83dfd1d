"""What surrounds a job goes wrong: disks, folders, signals, other jobs. Real ones, with real processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

# Before torch is imported: its store client complains, with a C++ stack, of every connection that ends.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@dataclass(frozen=True)
class Disk:
    """A small disk of its own, mounted at ``path``."""

    path: Path

    def fill(self) -> None:
        """Until not a byte more has room."""
        with open(self.path / "filler", "ab", buffering=0) as filler:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        filler.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        (self.path / "filler").unlink()

    def read_only(self, yes: bool) -> None:
        subprocess.run(["mount", "-o", f"remount,{'ro' if yes else 'rw'}", self.path], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """The run folder of ``toy`` on a disk of 8 MiB."""
    path = tmp_path / "run"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a disk can only be mounted by root: {mounted.stderr.strip()}")
    yield Disk(path)
    subprocess.run(["umount", "-l", path], check=True)
