"""The command line of the doctor: it gathers the facts of this machine and prints the rows."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from odyssey_megatron.config import config_from_argv
from odyssey_megatron.doctor import communicators, environment, flags, launch_line, megatron, packages
from odyssey_megatron.doctor.rows import OK, PROBLEM, WARNING, CheckRow, Host, Job, Package
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import printable
from odyssey_megatron.launch.process import leftovers
from odyssey_megatron.upstream.source import VERSIONED, Source, has_megatron

_USAGE = """usage: odyssey doctor [--json] [--verbose] [PATH] [FLAG ...]
       odyssey doctor --job FILE [--json] [PATH]
       odyssey doctor --clean

Looks for what would keep a job from running, or from surviving. Exit code 0: a job can run here; 1: none can.

  PATH      a Megatron-LM checkout; without it, the one that has the script of the --job, or the installed
            megatron-core
  FLAG ...  the job's flags, Megatron's and Odyssey's, e.g. --odyssey-device cpu: what they rule out is said too
  --job     only say what would become of the job in FILE: a launch script, whose variables are looked up and of which
            nothing is run; a model_config.yaml of Megatron-LM's tests; or FILE:NAME, one of the cases in a JSON file,
            {"cases": [{"name": NAME, "args": {"--flag": value}}]}. If the script takes variables or arguments:
            'NODES=4 train.sh 7b'. 0: it starts; 1: refused
  --verbose print what is fine, too
  --json    print JSON
  --clean   only remove what killed jobs have left in shared memory; living ones keep theirs"""
_MAY_BE_EMPTY = ("transformer-engine",)
_ALWAYS_SHOWN = ("flags", communicators.AREA)


def main(argv: Sequence[str]) -> int:
    """Run ``odyssey doctor``; return 0 if a job can run here, 1 if not. Raises ConfigError."""
    rest = [one for one in argv if one not in ("--json", "--verbose")]
    if rest and rest[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if rest == ["--clean"]:
        removed = [str(path) for path in leftovers.remove()]
        text = f"{len(removed)} removed" + "".join(f"\n  {path}" for path in removed)
        print(json.dumps({"removed": removed}, indent=1) if "--json" in argv else text)
        return 0
    job = _after("--job", rest)
    checkout = Path(rest.pop(0)) if rest and not rest[0].startswith("-") else _checkout_among(rest)
    if job is not None:
        return _judge(job, checkout, rest, as_json="--json" in argv)
    found = diagnose(checkout, Job(config=config_from_argv(rest), flags=tuple(rest)), _host(checkout))
    problems, warnings = (sum(row.state == state for row in found) for state in (PROBLEM, WARNING))
    if "--json" in argv:
        print(json.dumps({"can_run": not problems, "rows": [asdict(row) for row in found]}, indent=1))
    else:
        verdict = "no job can run like this" if problems else "a job can run"
        print(render(found, everything="--verbose" in argv))
        print(f"\n{problems} problem(s), {warnings} warning(s): {verdict}.")
    return 1 if problems else 0


def _checkout_among(flags: Sequence[str]) -> Path | None:
    """Return the Megatron-LM checkout that stands behind ``flags`` or between them, if one does."""
    return next((Path(one) for one in flags if has_megatron(one)), None)


def _after(flag: str, rest: list[str]) -> str | None:
    """Take ``flag`` and its value out of ``rest``, and return the value. ``FLAG=VALUE`` is one word."""
    for at, (name, equals, value) in enumerate(one.partition("=") for one in rest):
        if name == flag and equals:
            del rest[at]
            return value
    if flag not in rest:
        return None
    at = rest.index(flag)
    if at + 1 == len(rest):
        raise ConfigError(
            f"{flag} needs a file: a launch script, or a model_config.yaml of Megatron-LM's tests."
        )
    value = rest[at + 1]
    del rest[at : at + 2]
    return value


def _judge(named: str, checkout: Path | None, more: Sequence[str], *, as_json: bool) -> int:
    line = launch_line.read_job(named)
    checkout = checkout or launch_line.checkout_of(line)
    version = Source((*([checkout] if checkout else ()), *_installed())).version()
    verdict = launch_line.judged([*line.flags, *more], version, line, checkout=checkout)
    if as_json:
        print(json.dumps({"starts": verdict.starts, **asdict(verdict)}, indent=1))
    else:
        print("\n".join(map(printable, verdict.told(named).splitlines())))
    return 0 if verdict.starts else 1


def diagnose(checkout: Path | None, job: Job, host: Host) -> list[CheckRow]:
    """Return all rows. Raises ConfigError if ``checkout`` is not a Megatron-LM checkout."""
    source = Source((*([checkout] if checkout else ()), *_installed()))
    if checkout is not None and not (checkout / "megatron").is_dir():
        raise ConfigError(
            f"{checkout} is no Megatron-LM checkout: it has no folder 'megatron'. Name the one that has."
        )
    if source.file_of(VERSIONED) is None:
        missing = "neither there nor installed" if checkout else "not installed"
        remedy = "Name a Megatron-LM checkout: odyssey doctor PATH; or pip install megatron-core."
        found = [CheckRow(area="Megatron", name="megatron-core", state=PROBLEM, found=missing, remedy=remedy)]
        needed = {}
    else:
        found = list(megatron.rows(source, checkout, host))
        training = "megatron.training" if source.file_of("megatron.training") else "megatron.core"
        needed = source.needed_packages(training)
    found += packages.rows(host, job, needed)
    found += environment.rows(host, job, patched=megatron.is_patched(checkout))
    found += communicators.rows(host, job)
    found += flags.rows(job, source.version())
    return found


def render(rows: Sequence[CheckRow], *, everything: bool = False) -> str:
    """Return the rows for people: by area, problems first, each with its remedy below.

    Rows that are fine are only counted, unless ``everything`` is set.
    """
    lines = []
    area = ""
    order = (PROBLEM, WARNING, OK)
    areas = list(dict.fromkeys(row.area for row in rows))
    fine = [row for row in rows if row.state == OK]
    shown = rows if everything else [row for row in rows if row.state != OK or row.area in _ALWAYS_SHOWN]
    for row in sorted(shown, key=lambda row: (areas.index(row.area), order.index(row.state))):
        if row.area != area:
            area = row.area
            lines.append(f"{area}:")
        lines.append(f"  {row.state:<8} {row.name}: {row.found}")
        if row.remedy and row.state != OK:
            lines.append(f"           -> {row.remedy}")
    if not everything:
        lines.append(f"fine: {len(fine)} of {len(rows)} things that were looked at (--verbose names them)")
    return "\n".join(lines)


def _host(checkout: Path | None) -> Host:
    installed: dict[str, Package] = {}
    for one in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        compiled = name in _MAY_BE_EMPTY and any(file.suffix == ".so" for file in one.files or ())
        installed.setdefault(name, Package(version=one.version, compiled=compiled))
    return Host(
        environ=dict(os.environ),
        python=sys.version_info[:2],
        typing_names=frozenset(dir(typing)),
        packages=installed,
        can_import=lambda name: importlib.util.find_spec(name) is not None,
        extension_suffix=sysconfig.get_config_var("EXT_SUFFIX"),
        built_suffix=_built_suffix(checkout),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        has_gpu=Path("/proc/driver/nvidia/version").exists(),
        gpus=tuple(_gpus(Path("/proc/driver/nvidia/gpus"))),
    )


def _gpus(folder: Path) -> Iterator[str]:
    """Yield the models of the GPUs. The driver has a file for each, with a line ``Model: NVIDIA H100 80GB HBM3``."""
    with contextlib.suppress(OSError):
        for one in sorted(folder.glob("*/information")):
            yield from re.findall(r"^Model:\s*(.*\S)", one.read_text(errors="replace"), re.MULTILINE)


def _built_suffix(checkout: Path | None) -> str:
    command = ["python3-config", "--extension-suffix"]
    # Asked in the folder where make will run it: pyenv's follows the .python-version that a checkout has.
    there = checkout / "megatron" / "core" / "datasets" if checkout else None
    folder = there if there and there.is_dir() else None
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _installed() -> Iterator[Path]:
    """Yield the folders in which this Python would find ``megatron``; nothing of it is imported."""
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec else ():
        yield Path(folder).parent
