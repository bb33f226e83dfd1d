"""The ``odyssey`` command. Each subcommand imports what it needs, so that ``report`` works without torch."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from odyssey_megatron import __version__
from odyssey_megatron.errors import EXIT_BAD_INPUT, ConfigError
from odyssey_megatron.inputs import printable


def run_and_end() -> NoReturn:
    """Run the command as a process, and exit with its code."""
    try:
        from odyssey_megatron.launch.process.ending import exit_with
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # nothing has begun
    exit_with(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        from odyssey_megatron.launch.process.open_files import open_standard_streams

        open_standard_streams()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A name or a journal may hold characters that the terminal's encoding lacks.
                stream.reconfigure(errors="backslashreplace")
        code = _command(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _silenced(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader has seen enough, as with "| head"
        return _silenced(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = error.filename or "what this command prints"
        text = f"{what} could not be written: {error.strerror}. Make room, or write elsewhere."
        print(printable(f"odyssey: {text}"), file=sys.stderr)
        return _silenced(EXIT_BAD_INPUT)


def _command(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"odyssey-megatron {__version__}")
        return 0
    if name not in _COMMANDS:
        print(f"odyssey: unknown command {name!r}.\n{_usage()}", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        return _COMMANDS[name][0](rest)
    except ConfigError as error:
        print(printable(f"odyssey {name}: {error}"), file=sys.stderr)
        return EXIT_BAD_INPUT


def _silenced(code: int) -> int:
    """Return ``code`` and discard what is left in stdout's buffer, about which Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(argv: list[str]) -> int:
    from odyssey_megatron.launch import run

    return run.main(argv)


def _join(argv: list[str]) -> int:
    from odyssey_megatron.launch import run

    return run.main(argv, joins=True)


def _host(argv: list[str]) -> int:
    from odyssey_megatron.launch import host

    return host.main(argv)


def _report(argv: list[str]) -> int:
    from odyssey_megatron.metrics import report

    return report.main(argv)


def _top(argv: list[str]) -> int:
    from odyssey_megatron.watch import command

    return command.main(argv)


def _plan(argv: list[str]) -> int:
    from odyssey_megatron.studies import whatif

    return whatif.main_plan(argv)


def _simulate(argv: list[str]) -> int:
    from odyssey_megatron.studies import traceplay

    return traceplay.main_simulate(argv)


def _inject(argv: list[str]) -> int:
    from odyssey_megatron.launch import inject

    return inject.main(argv)


def _readmit(argv: list[str]) -> int:
    from odyssey_megatron.launch import readmit

    return readmit.main(argv)


def _doctor(argv: list[str]) -> int:
    from odyssey_megatron.doctor import command

    return command.main(argv)


def _patch(argv: list[str]) -> int:
    from odyssey_megatron import patch

    return patch.main(argv)


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "run": (_run, "start a training job: torchrun's arguments, then the script and its own"),
    "join": (_join, "replace a lost node of a running job: on the new node, with the arguments of its run"),
    "host": (
        _host,
        "host a job apart from its nodes, so that any may be lost: with the arguments of its run",
    ),
    "doctor": (_doctor, "looks for what would keep a job from running, or from surviving"),
    "patch": (_patch, "puts Odyssey's lines into a Megatron-LM checkout, or takes them out"),
    "inject": (_inject, "send a signal to a rank of a running job, or slow it down, to see it recover"),
    "readmit": (
        _readmit,
        "a GPU works again: bring the rank that was given up on it back into its running job",
    ),
    "plan": (_plan, "what would happen if some GPUs died: no GPU, torch or job needed"),
    "simulate": (_simulate, "plays a trace of failures under each policy and compares them"),
    "top": (_top, "what a job does: in this terminal, as a page, or as metrics for Prometheus"),
    "report": (_report, "what happened in a run: page, plots and table from its journal"),
}


def _usage() -> str:
    lines = [f"  {name:<8} {text}" for name, (_, text) in _COMMANDS.items()]
    more = "odyssey COMMAND --help says more, and odyssey --version which one this is."
    return "\n".join(["usage: odyssey COMMAND ...", "", *lines, "", more])


if __name__ == "__main__":
    run_and_end()
