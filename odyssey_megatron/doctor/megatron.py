"""What a Megatron-LM checkout is: its version, whether it is patched, and whether each seam is as expected."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from odyssey_megatron import patch
from odyssey_megatron.doctor.rows import OK, PROBLEM, WARNING, CheckRow, Host
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.upstream import compat, seams
from odyssey_megatron.upstream.seam_table import SEAMS
from odyssey_megatron.upstream.source import VERSIONED, Source

_FROM_TYPING = re.compile(r"^from typing import (?:\(([^)]*)\)|(.*))", re.MULTILINE)


def rows(source: Source, checkout: Path | None, host: Host) -> Iterator[CheckRow]:
    """Yield everything about the Megatron in ``source``, which has a megatron.core.

    Args:
        checkout: The folder that the user named; None: Megatron is installed.
    """
    version = source.version()
    yield _version(version) if version else _no_version(source)
    if checkout is not None:
        yield from _python(checkout, host)
        yield _patch(checkout)
    complete = source.file_of("megatron.training") is not None
    if not complete:
        yield _row(
            "megatron.training", WARNING, "not there: megatron-core comes without it",
            "For a script of Megatron-LM, name its checkout: odyssey doctor PATH.",
        )  # fmt: skip
    yield from _dataset_helpers(source, host)
    for seam in SEAMS if version else ():
        if complete or seam.target.startswith("megatron.core"):
            yield _seam(seams.check(seam, source, version or ""))


def is_patched(checkout: Path | None) -> bool:
    """Return whether all of Odyssey's lines are in the checkout."""
    if checkout is None:
        return False
    try:
        return not patch.install(checkout)
    except ConfigError:
        return False


def _row(name: str, state: str, found: str, remedy: str = "") -> CheckRow:
    return CheckRow(area="Megatron", name=name, state=state, found=found, remedy=remedy)


def _version(version: str) -> CheckRow:
    if version in compat.TESTED:
        return _row("megatron-core", OK, f"{version}, tested")
    known = [one.tag for one in patch.supported() if one.version == version]
    how = f"its seams were read ({known[0]})" if known else "nobody has looked at it"
    return _row(
        "megatron-core", WARNING, f"{version}: {how}, and no job has run with it",
        f"Use {_nearest(version)}, or try a short job first.",
    )  # fmt: skip


def _nearest(version: str) -> str:
    """Return the tested version that is nearest to ``version``, with its tag."""

    def distance(tested: str) -> list[int]:
        pairs = zip(*(re.findall(r"\d+", one)[:3] for one in (tested, version)), strict=False)
        return [abs(int(one) - int(other)) for one, other in pairs]

    nearest = min(compat.TESTED, key=distance)
    return f"{nearest} ({', '.join(one.tag for one in patch.supported() if one.version == nearest)})"


def _no_version(source: Source) -> CheckRow:
    return _row(
        "megatron-core", WARNING,
        f"no version can be read from {source.file_of(VERSIONED)} without running it: its seams were not looked at",
        "Write MAJOR, MINOR and PATCH there as plain numbers.",
    )  # fmt: skip


def _python(checkout: Path, host: Host) -> Iterator[CheckRow]:
    try:
        wanted = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["requires-python"]
    except (OSError, KeyError, TypeError, ValueError):
        return  # a fork may have dropped the file
    least = re.search(r">=\s*(\d{1,4})\.(\d{1,4})", str(wanted))
    found = f"{host.python[0]}.{host.python[1]}; the checkout wants {wanted}"
    if not least or host.python >= (int(least[1]), int(least[2])):
        yield _row("Python", OK, found)
    elif missing := _missing_from_typing(checkout, host):
        yield _row(
            "Python",
            PROBLEM,
            f"{found}, and {missing}",
            "Use a newer Python, or an older tag of Megatron-LM.",
        )
    else:
        yield _row(
            "Python", WARNING, f"{found}, though it imports nothing from typing that is missing here",
            "Try a short job first, or use a newer Python.",
        )  # fmt: skip


def _missing_from_typing(checkout: Path, host: Host) -> str:
    """Return in words what a file of ``checkout`` imports from ``typing`` that this Python does not have, or ''."""
    files = (file for part in ("core", "training") for file in (checkout / "megatron" / part).rglob("*.py"))
    for file in sorted(files):
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue  # such as an editor's lock, which is a dangling link
        for several, line in _FROM_TYPING.findall(text):
            imported = re.sub(r"#.*|\bas \w+", "", several or line)
            if missing := sorted({*re.findall(r"\w+", imported)} - host.typing_names):
                return f"{file.relative_to(checkout)} imports {', '.join(missing)} from typing, which has no such name"
    return ""


def _patch(checkout: Path) -> CheckRow:
    name, there = "odyssey patch", list[str]()
    uninstall = f"odyssey patch uninstall {checkout}"
    try:
        there = patch.marked(checkout)
        missing = patch.install(checkout)
    except ConfigError as error:
        if there:
            return _row(name, WARNING, f"its lines are in {', '.join(there)}: {error}", uninstall)
        return _row(name, WARNING, f"cannot be installed: {error}")
    if missing and there:
        return _row(
            name, WARNING, "installed in part, or by another version", f"odyssey patch install {checkout}"
        )
    return _row(name, OK, "installed" if there else "not installed, which 'odyssey run' does not need")


def _dataset_helpers(source: Source, host: Host) -> Iterator[CheckRow]:
    """Yield whether Megatron's data helpers are there.

    Megatron compiles them when it starts, for the Python of ``python3-config``; a virtual environment has
    none.
    """
    name = "dataset helpers"
    caller = source.file_of("megatron.core.datasets.utils")
    if caller is None or (caller.parent / f"helpers_cpp{host.extension_suffix}").is_file():
        return
    folder = caller.parent
    if not (folder / "Makefile").is_file():
        yield _row(
            name, PROBLEM, f"{folder} has none for this Python ({host.extension_suffix}), and no Makefile",
            "Install a megatron-core for this Python.",
        )  # fmt: skip
    elif not host.can_import("pybind11"):
        yield _row(name, PROBLEM, "not compiled, and pybind11 is missing", "pip install pybind11")
    elif host.built_suffix != host.extension_suffix:
        yield _row(
            name, PROBLEM, f"not compiled: Megatron would do it for {host.built_suffix or 'no Python'} "
            f"(python3-config), and this Python needs {host.extension_suffix}",
            f"make -C {folder} LIBEXT={host.extension_suffix}",
        )  # fmt: skip
    else:
        yield _row(name, OK, "not compiled; Megatron does it when it starts")


def _seam(finding: seams.SeamFinding) -> CheckRow:
    name, expected = finding.seam.target, _shown(finding.expected)
    if finding.state == "unused":
        return _row(name, OK, "not needed with this version")
    if finding.state == "ok":
        return _row(name, OK, expected)
    return _row(
        name, PROBLEM, f"{finding.state}: expected {'at least ' * finding.seam.open}{expected}, "
        f"found {_shown(finding.found)}; needed for this: {finding.seam.why}",
        finding.seam.remedy,
    )  # fmt: skip


def _shown(parameters: tuple[str, ...] | None) -> str:
    return "no such name" if parameters is None else f"({', '.join(parameters)})"
