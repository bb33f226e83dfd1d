"""What people read counts as Megatron does, and where the code names a module of this package, there is one."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from odyssey_megatron.names import about_size_text, layer_name, layer_names, lengths_text, step_name
from tests.test_imports import PACKAGE, sources


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((0,), "the embedding"),
        ((5,), "the head"),
        ((1,), "layer 1"),
        ((0, 1, 2), "the embedding and layers 1 to 2"),
        ((0, 1, 3, 4, 5), "the embedding, layer 1, layers 3 to 4 and the head"),
    ],
)
def test_layers(layers, text):
    assert layer_names(layers, 6) == text
    if len(layers) == 1:
        assert layer_name(layers[0], 6) == text


def test_steps():
    assert step_name(3) == "step 3 (iteration 4)"


def test_pipelines_are_counted_where_there_are_many():
    assert lengths_text([(8, 2), (7, 1)]) == "8+8+7"
    assert lengths_text([*[(18, 1)] * 900, (17, 2)]) == "900x18+2x17"


def test_sizes_are_rounded_in_a_unit_that_they_fill():
    sizes = {0: "0 bytes", 900: "900 bytes", 2000: "2.0 KiB", 51_000: "49.8 KiB", 2**20 - 1: "1.0 MiB"}
    sizes |= {3_355_443: "3.2 MiB", 2**30 - 1: "1.0 GiB", 2**30: "1.0 GiB", 71 * 2**30: "71.0 GiB"}
    assert {size: about_size_text(size) for size in sizes} == sizes


MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sources()
}
FILES = {path.name for path in sources()}


@functools.cache
def defined(path: Path) -> set[str]:
    """Names of functions, classes, variables and fields in the file."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return {one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.ClassDef)} | {
        one.attr if isinstance(one, ast.Attribute) else one.id
        for one in nodes
        if isinstance(one, ast.Attribute | ast.Name) and isinstance(one.ctx, ast.Store)
    }


def is_there(name: str) -> bool:
    """Whether a dotted name, of which the first packages may be left out, leads to something in this package."""
    parts = name.split(".")
    for at in range(1, len(parts) + 1):
        module, rest = ".".join(parts[:at]), set(parts[at:])
        for known, path in MODULES.items():
            if f".{known}".endswith(f".{module}") and rest <= defined(path):
                return True
    return False


def variables(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {one.arg for one in nodes if isinstance(one, ast.arg)} | defined(path)


def test_what_the_package_says_of_its_own_names_is_so():
    """Those between backquotes, in docstrings and comments. ``pretrain_`` is how Megatron-LM's scripts begin."""
    known = {part for module in MODULES for part in module.split(".")} - {"megatron"}
    wrong = []
    for path in sources():
        text = path.read_text()
        for name in re.findall(r"`(?!pretrain_)(?:odyssey_megatron\.)?([a-z_]\w*(?:\.\w+)+)`", text):
            first, *rest = name.split(".")
            is_file = rest[-1] == "py"
            # ``plan.bound_s`` is no module's where ``plan`` is a variable.
            is_ours = first in known and (len(rest) > 1 or first not in variables(path))
            if (is_file and name not in FILES) or (is_ours and not is_file and not is_there(name)):
                wrong.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert wrong == []
