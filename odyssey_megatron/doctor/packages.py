"""Packages that are missing, too old, or in each other's way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from odyssey_megatron.doctor.rows import OK, PROBLEM, WARNING, CheckRow, Host, Job
from odyssey_megatron.launch.line import LEAST_TORCH

_INSTALL = {"yaml": "PyYAML"}
"""Names of distributions that differ from the names by which they are imported."""
_TORCH = LEAST_TORCH, (2, 13), (2, 14)
"""The versions that tests have run with (docs/versions.md)."""
_PYTHON = (3, 11), (3, 12)
"""The same for Python."""
_TE_READS_LATE = (2, 6)
"""``te.READS_LATE`` of ``mcore/model/te.py``, which needs torch and so is not imported."""


def rows(host: Host, job: Job, needed: Mapping[str, str]) -> Iterator[CheckRow]:
    """Yield what is installed, compared with what ``job`` needs.

    Args:
        needed: The packages that importing megatron.training needs, each with a module that imports it.
    """
    yield _python(host)
    yield _torch(host)
    for name, wanted_by in sorted(needed.items()):
        if name != "torch":
            yield _needed(host, job, name, wanted_by)
    yield _transformer_engine(host, job)
    yield _apex(host)


def _row(name: str, state: str, found: str, remedy: str = "") -> CheckRow:
    return CheckRow(area="packages", name=name, state=state, found=found, remedy=remedy)


def _python(host: Host) -> CheckRow:
    found = _dotted(host.python)
    if host.python < _PYTHON[0]:
        older = f"{found} is older than {_dotted(_PYTHON[0])}"
        return _row("Python", PROBLEM, older, f"Use {_either(_PYTHON)}.")
    if host.python > _PYTHON[-1]:
        newer = f"{found} is newer than any that tests have run with"
        return _row("Python", WARNING, newer, f"Use {_either(_PYTHON)}, or try a short job first.")
    return _row("Python", OK, found)


def _torch(host: Host) -> CheckRow:
    package = host.packages.get("torch")
    if package is None:
        return _row("torch", PROBLEM, "not installed", "pip install torch, or use a container that has it.")
    version = _numbers(package.version)
    if _TORCH[0] <= version <= _TORCH[-1]:
        return _row("torch", OK, package.version)
    if version < LEAST_TORCH:
        return _row("torch", PROBLEM, f"{package.version} is too old", f"Use {_either(_TORCH)}.")
    return _row(
        "torch",
        WARNING,
        f"{package.version} is newer than any that tests have run with",
        f"Use {_either(_TORCH)}, or try a short job first.",
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _either(versions: Sequence[tuple[int, ...]]) -> str:
    return " or ".join(map(_dotted, versions))


def _needed(host: Host, job: Job, name: str, wanted_by: str) -> CheckRow:
    if host.can_import(name):
        return _row(name, OK, "can be imported")
    if name == "triton" and job.config.device == "cpu":
        return _row(name, OK, "not installed; --odyssey-device cpu does without")
    return _row(name, PROBLEM, f"missing: {wanted_by} imports it", f"pip install {_INSTALL.get(name, name)}")


def _transformer_engine(host: Host, job: Job) -> CheckRow:
    name = "transformer-engine"
    package = host.packages.get(name)
    wanted = job.value_of("--transformer-impl") or (
        "transformer_engine" if job.value_of("--num-layers") else ""
    )
    if package is None and wanted == "transformer_engine":
        return _row(
            name, PROBLEM, "not installed, and --transformer-impl transformer_engine, which is Megatron's default, "
            "builds the layers from it",
            "Install it (GPU containers have it), or add --transformer-impl local.",
        )  # fmt: skip
    if package is None:
        return _row(name, OK, "not installed; Megatron's own layers are used (--transformer-impl local)")
    core = [one for one in host.packages if one.startswith(name + "-cu")]
    # A build from source has its libraries inside, or a version that ends with the commit.
    if package.compiled or core or "+" in package.version:
        if _numbers(package.version) < _TE_READS_LATE:
            return _row(
                name, WARNING, f"{package.version}: with gradient accumulation fusion it would lose gradients in a "
                "recovery, so such a job is refused",
                "Use 2.6 or newer, or add --no-gradient-accumulation-fusion.",
            )  # fmt: skip
        return _row(
            name, OK, f"{package.version}; its weight gradients run apart, which no GPU has tried yet"
        )
    return _row(
        name, PROBLEM, f"{package.version} is the empty meta package: it raises RuntimeError when imported, and "
        "Megatron catches ImportError only",
        f"pip uninstall {name}, or pip install --no-build-isolation '{name}[pytorch]=={package.version}'.",
    )  # fmt: skip


def _apex(host: Host) -> CheckRow:
    package = host.packages.get("apex")
    if package is None:
        return _row("apex", OK, "not installed; torch's optimizers are used")
    if package.version.startswith("0.9"):
        return _row(
            "apex", WARNING, f"{package.version} is another project of that name, from PyPI",
            "pip uninstall apex; NVIDIA's is built from its repository.",
        )  # fmt: skip
    return _row("apex", OK, package.version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
