"""End a process with a given exit code, without the interpreter's own last part."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn


def exit_with(function: Callable[[], Any]) -> NoReturn:
    """Run ``function``, whose result is the exit code, and end this process as an interpreter ends.

    In a fork, the cleanup of its parent does not run. The interpreter's own last part is left out: it would abort the
    process (exit code 134) if a thread that nobody joins is in native code, as threads of the control plane are.
    """
    code = 1
    try:
        code = function()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        _end(code)


def will_exit_with(code: int) -> None:
    """Make this process end with ``code``, however its interpreter ends, without the interpreter's own last part.

    That part frees everything, for seconds in which no thread runs, so a rank that failed would be taken for hung. And
    if a thread in native code wakes up meanwhile, the process aborts.
    """

    def end() -> None:  # registered last, it is the first of the exit functions to run
        atexit.unregister(end)
        _end(code)

    atexit.register(end)


def _end(code: int) -> NoReturn:
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # of lines that have not ended
    os._exit(code & 0xFF)
