"""What the doctor looks at, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from odyssey_megatron.config import OdysseyConfig

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One thing that was looked at, and what was found."""

    area: str
    name: str
    state: str
    """ok; warning: worth knowing; problem: no job can run, or survive, like this."""
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed distribution."""

    version: str
    compiled: bool
    """Whether it has shared objects of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This machine and its Python, as far as they matter to a job."""

    environ: Mapping[str, str]
    python: tuple[int, int]
    typing_names: frozenset[str]
    """What this Python's module ``typing`` has."""
    packages: Mapping[str, Package]
    """Installed distributions by normalized name: lower case, with dashes."""
    can_import: Callable[[str], bool]
    """Whether there is a top-level module of that name; it is not imported."""
    extension_suffix: str
    """The suffix of compiled modules for this Python."""
    built_suffix: str
    """The suffix for which ``python3-config`` builds; '' without it."""
    interfaces: tuple[str, ...]
    """Names of the network interfaces."""
    has_gpu: bool
    gpus: tuple[str, ...] = ()
    """The GPU models by the driver's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The training job that is to run."""

    config: OdysseyConfig
    flags: tuple[str, ...]
    """Megatron's flags and Odyssey's."""

    def value_of(self, flag: str) -> str:
        """Return what follows ``flag`` on the command line, or ''."""
        for position, one in enumerate(self.flags):
            if one.startswith(flag + "="):
                return one.partition("=")[2]
            if one == flag:
                return next(iter(self.flags[position + 1 :]), "")
        return ""
