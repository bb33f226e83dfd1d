"""The shape of the package: who may import whom, what runs without torch, and the sizes of files and functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "odyssey_megatron"

BASE = {"errors", "config", "codec", "faults", "inputs", "names"}
PURE = BASE | {"cluster", "plan", "policy", "metrics", "diagnosis"}

ALLOWED: dict[str, set[str]] = {
    # Longest prefix wins. Names with a dot in front are third-party; the standard library is always allowed.
    "__init__": set(),
    "__main__": {"cli"},
    "names": set(),
    "errors": {"names"},
    "inputs": {"errors"},
    "faults": {"errors", "inputs"},
    "config": {"errors", "faults", "inputs", "policy"},  # the names of the policies
    "codec": {"errors"},
    "cluster": BASE,
    "plan": BASE | {"cluster", ".numpy", ".scipy"},
    "diagnosis": {".numpy"},
    "policy": BASE | {"cluster", "plan", "metrics", "diagnosis", ".numpy", ".scipy"},
    "studies": BASE | {"cluster", "plan", "policy", "metrics", "doctor", "upstream"},
    "metrics": BASE | {"plan", ".numpy"},
    "metrics/journal": {"errors", "codec", "inputs", "names"},
    "metrics/backlog": set(),
    "metrics/lines": set(),
    "metrics/outlet": {"metrics"},
    "metrics/records": {"inputs"},
    "metrics/plots": {"plan", "names", ".matplotlib"},
    "watch": BASE | {"metrics"},
    "watch/exposition": {"names", "metrics", ".prometheus_client"},
    "recover": PURE,
    "rebuild": PURE | {"recover", ".torch", ".numpy"},
    "execute": PURE | {"recover", "rebuild", ".torch", ".numpy"},
    "upstream": {"errors"},
    "upstream/compat": {"errors", ".megatron"},
    "mcore": PURE
    | {
        "upstream",
        "recover",
        "rebuild",
        "execute",
        "launch",
        ".torch",
        ".numpy",
        ".megatron",
        ".transformer_engine",
    },
    "launch": PURE | {"recover", "watch", ".torch"},
    "patch": {"errors", "inputs", "upstream"},
    "doctor": {"errors", "config", "codec", "inputs", "upstream", "patch", "launch", "cluster", "plan"},
    "cli": PURE | {"studies", "watch", "recover", "launch", "rebuild", "execute", "mcore", "patch", "doctor"},
}
"""Design section 3 as a table: package or module -> what it may import besides itself."""

ROOMS: dict[str, set[str]] = {
    "launch/agent": {"coordinator", "wire", "process"},
    "launch/coordinator": {"wire"},
    "launch/rank": {"wire", "process"},
    "launch/wire": {"process"},
    "launch/process": set(),
    "policy/costs": set(),
    "policy/shapes": set(),
    "policy/routes": {"shapes"},
}
"""Room of a package -> the other rooms of the package that it may import. It imports no module outside all rooms."""

IMPORTED_WITHOUT_TORCH = (
    *sorted(PURE), "studies", "upstream", "recover", "watch", "cli", "patch", "doctor", "launch/process/heartbeat",
    "launch/rank/injector",
)  # fmt: skip
NEEDS_MATPLOTLIB = {"odyssey_megatron.metrics.plots"}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    """``plan/layout`` for a module, ``plan`` for a package."""
    relative = path.relative_to(PACKAGE).with_suffix("")
    return (
        "/".join(relative.parts[:-1]) if relative.name == "__init__" and relative.parts[1:] else str(relative)
    )


def imports_of(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Each import statement with what it names in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def rule_for(name: str) -> set[str]:
    parts = name.split("/")
    for length in range(len(parts), 0, -1):
        prefix = "/".join(parts[:length])
        if prefix in ALLOWED:
            return ALLOWED[prefix]
    raise AssertionError(f"{name} has no import rule: add it to ALLOWED")


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_follow_the_table(path):
    name = name_of(path)
    allowed, own = rule_for(name), name.split("/")[0]
    for node, target in imports_of(ast.parse(path.read_text())):
        top, _, rest = target.partition(".")
        if top == "odyssey_megatron":
            inner = rest.split(".")[0]
            assert inner in allowed | {own, "__version__"}, f"{path}:{node.lineno}: {name} imports {target}"
        elif top not in sys.stdlib_module_names:
            assert f".{top}" in allowed, f"{path}:{node.lineno}: {name} imports {target}"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_follow_their_table(room):
    package, own = room.split("/")
    found = sources(PACKAGE / room)
    assert len(found) > 3
    for path in found:
        for node, target in imports_of(ast.parse(path.read_text())):
            if target.startswith(f"odyssey_megatron.{package}."):
                other = target.split(".")[2]
                assert other in ROOMS[room] | {own}, f"{path}:{node.lineno}: {room} imports {target}"


def test_the_command_line_imports_only_inside_its_subcommands():
    path = PACKAGE / "cli.py"
    top_level = [
        name
        for statement in ast.parse(path.read_text()).body
        for _, name in imports_of(statement)
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef))
    ]
    ours = {name.split(".")[1] for name in top_level if name.startswith("odyssey_megatron.")}
    assert ours <= BASE | {"__version__"}, "so that `odyssey report` does not wait for torch"


def test_only_compat_looks_at_versions():
    lookups = {"importlib.metadata", "packaging.version", "package_info"}
    for path in sources():
        if name_of(path) in ("upstream/compat", "doctor/command"):  # the doctor prints them
            continue
        tree = ast.parse(path.read_text())
        for node, target in imports_of(tree):
            assert not any(one in target for one in lookups), f"{path}:{node.lineno}: {target}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "__version__":
                assert ast.unparse(node.value) == "odyssey_megatron", f"{path}:{node.lineno}"


def test_pure_packages_import_without_torch_megatron_and_matplotlib():
    modules = [
        "odyssey_megatron." + name_of(path).replace("/", ".")
        for path in sources()
        if name_of(path).startswith(IMPORTED_WITHOUT_TORCH) and path.name != "__init__.py"
    ]
    assert len(modules) > 20
    script = f"""
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "matplotlib"):
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
for name in {sorted(set(modules) - NEEDS_MATPLOTLIB)!r}:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ["odyssey_megatron", "examples", "tests"])
def test_files_and_functions_are_short(folder):
    long = []
    for path in sources(ROOT / folder):
        text = path.read_text()
        if text.count("\n") > MAX_FILE_LINES:
            long.append(f"{path}: {text.count(chr(10))} lines, at most {MAX_FILE_LINES}: split it by concept")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_no_catch_all_modules():
    assert not [path for path in sources() if path.stem in ("utils", "helpers", "common", "misc")]


def test_nothing_names_a_developer_s_machine():
    suffixes = {".py", ".sh", ".md", ".toml", ".txt", ".yml", ".json", ""}
    skipped = {".git", ".venv", ".hypothesis", "shared", "__pycache__", "build", "dist"}
    private = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/\w")
    for path in ROOT.rglob("*"):
        inside = path.relative_to(ROOT)
        if path.suffix not in suffixes or not path.is_file() or skipped & set(inside.parts):
            continue
        if any(
            part.startswith("odyssey-") or part.endswith(("_cache", ".egg-info")) for part in inside.parts
        ):
            continue
        found = private.search(path.read_text(errors="replace"))
        assert found is None, f"{inside}: {found.group() if found else ''}"
