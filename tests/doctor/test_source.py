"""Reading a Megatron checkout without importing it, on small trees made here."""

from __future__ import annotations

import pytest

from odyssey_megatron.errors import MegatronIncompatible
from odyssey_megatron.upstream import seams
from odyssey_megatron.upstream.seams import Seam
from odyssey_megatron.upstream.source import Source


def tree(root, **files):
    """Writes ``files`` (dots for slashes) below ``root``."""
    for module, text in files.items():
        path = root / (module.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source((root,))


def test_a_function_is_found_through_re_exports(tmp_path):
    source = tree(
        tmp_path,
        megatron__a="from .b import inner as outer\nfrom megatron.c import Thing\n",
        megatron__b="if True:\n    def inner(x, /, y, *rest, z=1, **more): ...\n",
        megatron__c="class Thing:\n    LIMIT: int = 3\n    @staticmethod\n    def go(self, z): ...\n",
    )
    assert source.parameters("megatron.a:outer") == ("x", "y", "*rest", "z", "**more")
    assert source.parameters("megatron.a:Thing.go") == ("self", "z")
    assert source.parameters("megatron.a:Thing.LIMIT") == source.parameters("megatron.a:Thing") == ()


@pytest.mark.parametrize(
    "target", ["megatron.none:f", "megatron.a:f", "megatron.a:C.f", "megatron.a:round.x"]
)
def test_what_is_not_there_is_not_found(tmp_path, target):
    source = tree(
        tmp_path,
        megatron__a="from megatron.a import round\nclass C: ...\nx = 1\ndef g():\n    def f(): ...\n",
    )
    assert source.parameters(target) is None


def test_the_version_is_read_and_not_run(tmp_path):
    text = "raise SystemExit\nMAJOR = 0\nMINOR = 17\nPATCH = 1\nPRE_RELEASE = 'rc0'\n"
    assert tree(tmp_path, megatron__core__package_info=text).version() == "0.17.1rc0"
    assert Source((tmp_path / "elsewhere",)).version() is None


def test_needed_packages_are_those_of_unconditional_imports(tmp_path):
    source = tree(
        tmp_path,
        megatron__a="import os\nimport six.moves\nfrom . import b\ntry:\n    import apex\nexcept ImportError: ...\n",
        megatron__b="from torch import nn\ndef f():\n    import flask\n",
    )
    assert source.needed_packages("megatron.a") == {"six": "megatron.a", "torch": "megatron.b"}


def seam(**signatures):
    return Seam(
        target="megatron.a:f",
        why="to test",
        signatures={version.replace("v", "0."): names for version, names in signatures.items()},
    )


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.15.9", None), ("0.16.1", ("a",)), ("0.17.0", ("a",)), ("0.18.2", None), ("0.20.0", ("a", "b"))],
)
def test_the_newest_record_that_is_not_newer_than_the_version_counts(version, expected):
    assert seam(v16="a", v18=None, v19="a b").expected(version) == expected


@pytest.mark.parametrize(
    ("text", "is_open", "state"),
    [
        ("def f(a, b): ...", False, "ok"),
        ("def f(b, a): ...", False, "changed"),
        ("def f(a, b, c=1): ...", False, "changed"),
        ("def f(c, b, a): ...", True, "ok"),
        ("def f(a): ...", True, "changed"),
        ("", True, "missing"),
    ],
)
def test_states(tmp_path, text, is_open, state):
    one = Seam(target="megatron.a:f", why="to test", signatures={"0.16": "a b"}, open=is_open)
    finding = seams.check(one, tree(tmp_path, megatron__a=text + "\n"), "0.16.1")
    assert finding.state == state
    if state == "ok":
        finding.demand()
    else:
        with pytest.raises(MegatronIncompatible, match=r"megatron.a:f is .* 0\.16\.1.*expected.*a, b.*found"):
            finding.demand()
