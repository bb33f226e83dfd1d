"""Ranks of groups that are tried beside the tests: in processes of their own, forked from one that has Megatron."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.jobserver import CHECKOUT


def all_end(run: Callable[..., None], given: Sequence[tuple[Any, ...]]) -> bool:
    """Whether all ranks, each with its arguments for ``run``, end without an error."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=one) for one in given]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return not any(one.exitcode for one in ranks)


def asked(request: pytest.FixtureRequest, cases: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``cases`` whose tests, ``...[case]`` in the file of ``request``, are run in this session."""
    names = [item.name for item in request.session.items if item.path == request.path]
    return {case: cases[case] for case in cases if any(name.endswith(f"[{case}]") for name in names)}


def printed(module: str, folder: Path, cases: Mapping[str, Any]) -> str:
    """What ``module`` prints of ``cases``."""
    command = [sys.executable, "-m", module, str(folder), json.dumps(cases)]
    ran = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout
