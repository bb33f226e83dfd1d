"""Seams: the names in Megatron that Odyssey replaces or calls. Each has a record that is checked before it is relied
upon.

A seam is checked against the source (``check``: nothing is imported) or, when it is put to use, against the object
(``apply``). A seam that is missing or has changed stops the start with :class:`MegatronIncompatible`. The table is in
``seam_table.py``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from odyssey_megatron.errors import MegatronIncompatible
from odyssey_megatron.upstream import compat
from odyssey_megatron.upstream.source import Source

READ = ("core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0")
"""The tags whose sources the records were compared with. The versions that jobs ran with are ``compat.TESTED``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One name in Megatron that Odyssey relies on."""

    target: str
    """``module:name`` or ``module:Class.name``: where Megatron looks the name up, or where it is defined."""
    why: str
    signatures: Mapping[str, str | None]
    """Version (major.minor) -> the names of the parameters from this version on; None: the seam does not exist there,
    and is not needed.
    """
    open: bool = False
    """Whether there may be other parameters besides: we pass everything on, or call it by keyword."""
    only_if: str = ""
    """Which jobs need it; empty: all. If set, it is checked when it is put to use, not at the start of every job."""
    remedy: str = "Use a tested version of Megatron-LM, or train without --odyssey."

    def expected(self, version: str) -> tuple[str, ...] | None:
        """The parameters that ``version`` should have, by the newest record that is not newer; None: the seam is not
        needed.
        """
        known = [since for since in self.signatures if _major_minor(since) <= _major_minor(version)]
        if not known:
            return None
        names = self.signatures[max(known, key=_major_minor)]
        return None if names is None else tuple(names.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamFinding:
    """The result of checking one seam."""

    seam: Seam
    version: str
    expected: tuple[str, ...] | None
    found: tuple[str, ...] | None
    """Its parameters; None if the target does not exist."""

    @property
    def state(self) -> str:
        """ok, changed, missing, or unused: not needed with this version."""
        if self.expected is None:
            return "unused"
        if self.found is None:
            return "missing"
        fits = set(self.expected) <= set(self.found) if self.seam.open else self.expected == self.found
        return "ok" if fits else "changed"

    def demand(self) -> None:
        """Raise MegatronIncompatible unless the seam can be relied upon."""
        if self.state in ("ok", "unused"):
            return
        among = "among its parameters" if self.seam.open else "the parameters"
        wanted = f"{among} ({', '.join(self.expected or ())})"
        found = "no such name" if self.found is None else f"({', '.join(self.found)})"
        raise MegatronIncompatible(
            f"{self.seam.target} is {self.state} in megatron-core {self.version}: expected {wanted}, found {found}. "
            f"Odyssey needs it for this: {self.seam.why}. Read in {', '.join(READ)}; jobs ran with "
            f"{', '.join(compat.TESTED)}. {self.seam.remedy}"
        )


def check(seam: Seam, source: Source, version: str) -> SeamFinding:
    """Look ``seam`` up in source code, which is not imported."""
    return SeamFinding(
        seam=seam, version=version, expected=seam.expected(version), found=source.parameters(seam.target)
    )


def check_live(seam: Seam, version: str) -> SeamFinding:
    """Look ``seam`` up in the imported Megatron. Raises MegatronIncompatible if its module cannot be imported."""
    expected = seam.expected(version)
    found = None
    if expected is not None:
        try:
            owner, name = _resolve(seam.target)
            found = _parameters_of(vars(owner)[name])
        except ImportError as error:
            module = seam.target.partition(":")[0]
            if not f"{module}.".startswith(f"{error.name}.") or not isinstance(error, ModuleNotFoundError):
                python = ".".join(map(str, sys.version_info[:2]))
                raise MegatronIncompatible(
                    f"{module} of megatron-core {version} cannot be imported ({error}; Python {python}). odyssey "
                    "doctor, with the path of the checkout, names packages that are missing, and the Python that this "
                    "version asks for."
                ) from error
        except (AttributeError, KeyError):
            pass  # missing: the finding says so
    return SeamFinding(seam=seam, version=version, expected=expected, found=found)


def demand_all(table: Iterable[Seam]) -> None:
    """Check that every seam of ``table`` that all jobs need is there as recorded. Raises MegatronIncompatible."""
    version = compat.check_version()
    for seam in table:
        if not seam.only_if:
            check_live(seam, version).demand()


_WITHOUT_COPIES = sys.stdlib_module_names | {"odyssey_megatron", "torch", "numpy", "scipy", "sympy", "mpmath"}
"""Packages that import nothing of Megatron's, or that mean the original, and so are not searched for copies. Looking at
a name writes to its value's reference count, which in a forked process copies the page; for these packages that took
longer than building the model.
"""

_applied: dict[str, tuple[Any, str, Any, Any]] = {}
"""Target -> module or class, name in it, the value before, the value now."""


def apply(seam: Seam, replacement: Callable[..., Any]) -> None:
    """Replace ``seam``, and every copy of it that a module has imported, by ``replacement``.

    Copies in Odyssey's own modules stay: they mean the original. Nothing is done if this version neither has nor needs
    the seam. Raises MegatronIncompatible.
    """
    if not is_needed(seam):
        return
    assert seam.target not in _applied, f"{seam.target} is replaced already"
    check_live(seam, compat.check_version()).demand()
    owner, name = _resolve(seam.target)
    before = vars(owner)[name]
    assert inspect.isroutine(before), f"{seam.target} is no function"
    after = staticmethod(replacement) if isinstance(before, staticmethod) else replacement
    _applied[seam.target] = (owner, name, before, after)
    _exchange(owner, name, before, after)


def wrap(seam: Seam, wrapper: Callable[..., Any]) -> None:
    """As :func:`apply`, but ``wrapper`` is called with the original function before the arguments."""
    if not is_needed(seam):
        return
    function = original(seam)

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    apply(seam, replaced)


def original(seam: Seam) -> Any:
    """Megatron's own value at ``seam``, whether it has been replaced or not. Raises MegatronIncompatible."""
    if seam.target in _applied:
        value = _applied[seam.target][2]
    else:
        check_live(seam, compat.check_version()).demand()
        owner, name = _resolve(seam.target)
        value = vars(owner)[name]
    return value.__func__ if isinstance(value, staticmethod) else value


def is_applied(seam: Seam) -> bool:
    return seam.target in _applied


def is_needed(seam: Seam) -> bool:
    """Whether there is something to replace in the imported version. Raises MegatronIncompatible."""
    return seam.expected(compat.check_version()) is not None


def _exchange(owner: Any, name: str, old: Any, new: Any) -> None:
    setattr(owner, name, new)
    for module_name, module in list(sys.modules.items()):  # includes the user's script
        if module_name.partition(".")[0] not in _WITHOUT_COPIES:
            for alias, value in list(getattr(module, "__dict__", {}).items()):
                if value is old:
                    setattr(module, alias, new)


def _resolve(target: str) -> tuple[Any, str]:
    """The module or class that has the name, and the name. Raises ImportError, AttributeError."""
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), name


def _parameters_of(value: Any) -> tuple[str, ...]:
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if not inspect.isroutine(function):
        return ()
    parameters = inspect.signature(function).parameters.values()
    return tuple(str(one).partition(":")[0].partition("=")[0] for one in parameters)  # including its stars


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
