"""Reads Megatron's sources without importing them, with any Python, even from a checkout that nobody has run yet."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from odyssey_megatron.errors import ConfigError

VERSIONED = "megatron.core.package_info"
"""The module that says which version it is."""
_MAX_HOPS = 8
"""Largest number of re-exports to follow from a name to its definition; Megatron's chains have two."""


@dataclass(frozen=True, slots=True)
class Source:
    """Folders that hold Python packages; as on ``sys.path``, the first one that has a module wins."""

    roots: tuple[Path, ...]

    def file_of(self, module: str) -> Path | None:
        """The file of a module or package; None if there is none."""
        for root in self.roots:
            base = root.joinpath(*module.split("."))
            for path in (base / "__init__.py", base.parent / f"{base.name}.py"):
                if path.is_file():
                    return path
        return None

    def parameters(self, target: str) -> tuple[str, ...] | None:
        """The parameter names of ``module:function`` or ``module:Class.method``; None if it does not exist.

        ``*args`` and ``**kwargs`` keep their stars. What is not a function has no parameters. Raises ConfigError.
        """
        module, _, path = target.partition(":")
        found = self._definition(module, path, _MAX_HOPS)
        if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _names(found.args)
        return None if found is None else ()

    def version(self) -> str | None:
        """The version that ``megatron.core`` reports; None if there is no megatron.core, or none that can be read."""
        file = self.file_of(VERSIONED)
        if file is None:
            return None
        values = {
            target.id: node.value.value
            for node in _parse(file).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        numbers = [values.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
        return None if None in numbers else ".".join(map(str, numbers)) + str(values.get("PRE_RELEASE", ""))

    def needed_packages(self, module: str) -> dict[str, str]:
        """The other packages without which ``module`` cannot be imported, each with a module that imports it.

        Only unconditional imports are followed; those inside functions, ``try`` and ``if`` are optional.
        """
        needed: dict[str, str] = {}
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            name = waiting.pop()
            file = None if name in seen else self.file_of(name)
            seen.add(name)
            if file is None:
                continue
            for wanted in _imports(_parse(file), _package(name, file)):
                top = wanted.partition(".")[0]
                if top == module.partition(".")[0]:
                    parents = wanted.split(".")
                    waiting += [".".join(parents[:end]) for end in range(1, len(parents) + 1)]
                elif top not in sys.stdlib_module_names:
                    needed.setdefault(top, name)
        return needed

    def _definition(self, module: str, path: str, hops: int) -> ast.stmt | None:
        file = self.file_of(module)
        if file is None or not hops:
            return None
        name, _, rest = path.partition(".")
        found = _binding(_parse(file).body, name)
        if isinstance(found, ast.ImportFrom):
            (alias,) = (one for one in found.names if (one.asname or one.name) == name)
            origin = _origin(found, _package(module, file))
            return self._definition(origin, ".".join(filter(None, (alias.name, rest))), hops - 1)
        while rest and isinstance(found, ast.ClassDef):
            name, _, rest = rest.partition(".")
            found = _binding(found.body, name)
        return None if rest else found


def has_megatron(folder: str) -> bool:
    """Whether ``folder`` is a Megatron-LM checkout, as far as its folders say."""
    return os.path.isdir(os.path.join(folder, "megatron", "core"))


def _parse(file: Path) -> ast.Module:
    """The syntax tree of ``file``. Raises ConfigError if it is not valid Python."""
    try:
        return _tree(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no Python source ({error}). Restore it (git checkout).") from error


@functools.lru_cache(maxsize=32)  # a tree takes some megabytes
def _tree(text: bytes) -> ast.Module:
    return ast.parse(text)


def _package(module: str, file: Path) -> list[str]:
    parts = module.split(".")
    return parts if file.name == "__init__.py" else parts[:-1]


def _origin(node: ast.ImportFrom, package: list[str]) -> str:
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def _imports(tree: ast.Module, package: list[str]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, package)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _binding(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The statement that defines ``name``, also inside ``if`` and ``try``."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound = {node.name}
        elif isinstance(node, ast.ImportFrom):
            bound = {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound = {target.id for target in targets if isinstance(target, ast.Name)}
        else:
            bound = set()
        if name in bound:
            return node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)) and (found := _binding(getattr(node, inner, []), name)):
                return found
    return None


def _names(args: ast.arguments) -> tuple[str, ...]:
    names = [one.arg for one in (*args.posonlyargs, *args.args)]
    if args.vararg:
        names.append("*" + args.vararg.arg)
    names += [one.arg for one in args.kwonlyargs]
    if args.kwarg:
        names.append("**" + args.kwarg.arg)
    return tuple(names)
