"""Fork torch elastic's processes from a zygote, which has imported everything already.

The seam is the name ``torch.distributed.elastic.multiprocessing.api.get_subprocess_handler`` (torch 2.13).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing import api as multiprocessing_api

from odyssey_megatron.launch.process.signals import heeded_behind
from odyssey_megatron.launch.process.zygote import ForkedProcess, Zygote


@contextlib.contextmanager
def forking(zygote: Zygote | None) -> Iterator[None]:
    """Return a context in which torch elastic starts processes by forking them from ``zygote``."""
    if zygote is None:
        yield
        return

    def handler(
        entrypoint: str, args: tuple[Any, ...], env: dict[str, str], stdout: Any, stderr: Any, **_: Any
    ) -> ForkedHandler:
        whole = {**os.environ, **env}
        argv = [str(one) for one in args]
        return ForkedHandler(zygote.run(argv, env=whole, stdout=stdout or None, stderr=stderr or None))

    original = multiprocessing_api.get_subprocess_handler
    multiprocessing_api.get_subprocess_handler = handler  # type: ignore[assignment]
    try:
        yield
    finally:
        multiprocessing_api.get_subprocess_handler = original


@contextlib.contextmanager
def all_begun() -> Iterator[None]:
    """Return a context for starting processes, in which signals wait from the first process on until the body ends.

    If a signal came between two starts, torch would end, and leave behind the processes that have begun.
    """
    original = multiprocessing_api.get_subprocess_handler
    with contextlib.ExitStack() as waiting:

        def handler(*args: Any, **named: Any) -> Any:
            multiprocessing_api.get_subprocess_handler = original
            waiting.enter_context(heeded_behind())
            return original(*args, **named)

        multiprocessing_api.get_subprocess_handler = handler
        try:
            yield
        finally:
            multiprocessing_api.get_subprocess_handler = original


class ForkedHandler:
    """A forked process with the interface that torch elastic expects of a started process."""

    def __init__(self, proc: ForkedProcess):
        self.proc = proc

    def close(self, death_sig: signal.Signals | None = None) -> None:
        self.proc.kill(death_sig or signal.SIGTERM)
