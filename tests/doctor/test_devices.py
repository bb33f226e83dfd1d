"""The list of what Megatron-LM decides by device: its lines are there, its tests are, and no branch is missing.

Branches are searched for by words (``KINDS``), strings and comments left out. Each that is found, as (file, function,
kind), must have a row, or be named below the table as one that a row speaks for, or that no job runs.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import NEEDS_MEGATRON_LM, megatron_lm_checkouts
from tests.gpu import gpu_tests
from tests.launch.jobserver import CHECKOUT

ROW = re.compile(
    r"\| `(?P<path>[\w/.]+):(?P<line>\d+)` `(?P<text>[^`]+)`(?P<also>(?:, `:\d+`)*) \|.*\| (?P<waits>[^|]+) \|"
)
TESTS = {"TE": "test_te_gpu.py", "hybrid": "test_hybrid_gpu.py", "fusions": "test_fusions_gpu.py"}
KINDS = {
    kind: re.compile("|".join(words.split()))
    for kind, words in {
        "TE": r"(?<!extensions\.)\btransformer_engine(?!_config|_spec) \bHAVE_TE \bis_te_min_version\b \btex?\.\w",
        "apex": r"\bapex\b \bamp_C\b \bfused_weight_gradient_mlp_cuda\b \bHAVE_(APEX|\w*_LAYER_NORM)",
        "triton": r"(?<!\.)\btriton\b \bHAVE_TRITON\b",
        "kernels": r"""
            \bscaled_\w*softmax_cuda\b \bflash_?attn\w*(?=[.\s]) \bflash_mla\b \bmamba_ssm\. \bcausal_conv1d \bfla\b
            \bfast_hadamard \bflashinfer \bimport\s+grouped_gemm\b \bis_(mamba|causal_conv1d|fa)_min_version\b
            \bHAVE_(FA3|FMLA|FLA|FUSED_QKV_ROPE|MAMBA_SSM|DEEP_EP|HYBRIDEP|EMERGING_OPTIMIZERS)\b""",
        "compiled": r"\btorch\.compile\b \bjit_fuser\s=",
        "streams": r"\bcuda\.(\w+_)?([sS]tream|Event)\b \bwait_(stream|event)\b \brecord_stream\b",
        "waits": r"\.synchronize\(",
        "pinned": r"\bpin_memory\b \bnon_blocking\b",
        "asked": r"\bis_(cuda|cpu)\b \bcuda\.is_available\b \bdevice\.type\b",
    }.items()
}
"""Words of source by which branches are known."""


class Branch(NamedTuple):
    """Lines of one function, or of a module, in which a device decides."""

    path: str
    """Below ``megatron/``."""
    function: str
    """With its class; empty outside of functions."""
    kind: str


def sections() -> list[list[str]]:
    """The lines of the document, by its headings."""
    found: list[list[str]] = [[]]
    for line in (CHECKOUT / "docs/devices.md").read_text().splitlines():
        found += [[]] if line.startswith("## ") else []
        found[-1].append(line)
    return found


def rows() -> list[re.Match[str] | None]:
    return [ROW.fullmatch(line) for line in sections()[0] if line.startswith("| `")]


def spoken_for() -> Iterator[tuple[str, str]]:
    """(kind, pattern of files, or of ``file:function``) of which a row above says what is taken."""
    for line in sections()[1]:
        if cells := re.fullmatch(r"\| `([\w ]+)` \| (.*) \| [^|]+ \|", line):
            yield from ((cells[1], name) for name in re.findall(r"`([^`]+)`", cells[2]))


def patterns(section: int) -> list[str]:
    """Those of files, or of ``file:function``, in the lists below the tables: what no job runs, and what is new."""
    return re.findall(r"`((?:core|training)/[^`]+)`", "\n".join(sections()[section]))


def fits(branch: Branch, pattern: str) -> bool:
    """Behind a file's name a colon alone stands for its lines outside of functions."""
    return fnmatch(branch.path, pattern) or fnmatch(f"{branch.path}:{branch.function}", pattern)


def code(text: str) -> list[str]:
    """Its lines, with blanks in place of strings and comments."""
    lines = [[*line] for line in text.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            (first, start), (last, stop) = token.start, token.end
            for number in range(first, last + 1):
                line = lines[number - 1]
                low, high = (start if number == first else 0), (stop if number == last else len(line))
                line[low:high] = " " * (high - low)
    return ["".join(line) for line in lines]


def functions(text: str) -> dict[int, str]:
    """Line -> the function around it; of a class, Class.function."""
    found: dict[int, str] = {}

    def look(nodes: list[ast.stmt], before: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.update(
                    dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), before + node.name)
                )
            elif isinstance(node, ast.ClassDef):
                look(node.body, f"{node.name}.")
            elif isinstance(node, ast.If | ast.Try):
                handlers = node.handlers if isinstance(node, ast.Try) else []
                look(
                    [*node.body, *node.orelse, *(one for handler in handlers for one in handler.body)], before
                )

    with warnings.catch_warnings(action="ignore"):  # escapes in strings of Megatron's
        look(ast.parse(text).body, "")
    return found


@cache
def branches(checkout: Path) -> dict[Branch, list[int]]:
    """With their lines."""
    found: dict[Branch, list[int]] = {}
    root = checkout / "megatron"
    for path in sorted(one for top in ("core", "training") for one in (root / top).rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(root))
        if not any(words.search(text) for words in KINDS.values()):
            continue
        around = functions(text)
        for number, line in enumerate(code(text), start=1):
            for kind, words in KINDS.items():
                if words.search(line):
                    found.setdefault(Branch(name, around.get(number, ""), kind), []).append(number)
    return found


def lines_of(row: re.Match[str]) -> list[int]:
    return [int(row["line"]), *map(int, re.findall(r"\d+", row["also"]))]


def test_each_row_names_its_line_and_what_waits_for_it():
    found = rows()
    assert all(found)
    assert len(found) > 20
    waits = {re.sub(r" \(.*\)", "", name) for one in found for name in one["waits"].split(", ")}
    assert waits == {"jobs", "jobs of Megatron-LM's", "–", *TESTS}
    marked = {f"tests/mcore/{name}" for name in TESTS.values()}
    assert marked <= {*gpu_tests()}


def test_the_lines_are_those_of_the_checkout(megatron_lm):
    wrong = []
    for one in rows():
        lines = (megatron_lm / "megatron" / one["path"]).read_text().splitlines()
        if lines[int(one["line"]) - 1].strip() != one["text"]:
            wrong.append((one["path"], one["line"], lines[int(one["line"]) - 1].strip()))
    assert not wrong


def missed(checkout: Path, first: Path) -> list[tuple[Branch, list[int]]]:
    """Of a checkout's branches those that the document does not name; its rows' lines are those of ``first``."""
    in_rows = {(one["path"], number) for one in rows() for number in lines_of(one)}
    known = {
        branch
        for branch, lines in branches(first).items()
        if in_rows & {(branch.path, line) for line in lines}
    }
    spoken = [*spoken_for()]
    named = [*patterns(2), *(patterns(3) if checkout != first else [])]
    return [
        (branch, lines)
        for branch, lines in branches(checkout).items()
        if branch not in known
        and not any(branch.kind == kind and fits(branch, one) for kind, one in spoken)
        and not any(fits(branch, one) for one in named)
    ]


def test_no_branch_is_missing(any_megatron_lm, megatron_lm):
    assert not missed(any_megatron_lm, megatron_lm)


def test_all_that_is_named_is_there(megatron_lm):
    found = branches(megatron_lm)
    for one in rows():
        held = {line for branch, lines in found.items() if branch.path == one["path"] for line in lines}
        assert {*lines_of(one)[1:]} <= held, one["path"]
    for kind, one in spoken_for():
        assert any(branch.kind == kind and fits(branch, one) for branch in found), one
    assert not [one for one in patterns(2) if not any(fits(branch, one) for branch in found)]


def test_what_is_new_is_there():
    others = [branches(one) for one in megatron_lm_checkouts()[1:]]
    if len(others) < 3:
        pytest.skip(NEEDS_MEGATRON_LM)
    for pattern in patterns(3):
        assert any(fits(branch, pattern) for found in others for branch in found), pattern
