"""The end of a process."""

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
    """Runs ``function``, whose result is the exit code, and ends this process like an interpreter ends; a fork without
    its parent's cleanup. The interpreter's own last part would abort a process where a thread that nobody joins is in
    native code, as the control plane's are: exit code 134.
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
    """However this interpreter ends, its process does so with ``code``, without the interpreter's own last part. That
    frees all there is, for seconds in which no thread gets on: a rank that failed would be taken for hung. And whatever
    wakes a thread in native code meanwhile aborts the process.
    """

    def end() -> None:  # the first of the exit functions, as the last that was registered
        atexit.unregister(end)
        _end(code)

    atexit.register(end)


def _end(code: int) -> NoReturn:
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)
