"""The table of seams held against the source of every Megatron-LM checkout that is given."""

from __future__ import annotations

import ast

from odyssey_megatron.upstream import seams
from odyssey_megatron.upstream.seam_table import SEAMS
from odyssey_megatron.upstream.source import Source


def test_each_seam_is_as_recorded(any_megatron_lm):
    source = Source((any_megatron_lm,))
    version = source.version()
    assert version is not None
    findings = [seams.check(seam, source, version) for seam in SEAMS]
    wrong = [
        (one.seam.target, one.expected, one.found) for one in findings if one.state not in ("ok", "unused")
    ]
    assert not wrong
    there = [one.seam.target for one in findings if one.state == "unused" and one.found is not None]
    assert not there, "recorded as gone"


def test_targets_are_listed_once():
    targets = [seam.target for seam in SEAMS]
    assert len(set(targets)) == len(targets) > 30


def test_transformer_engine_is_told_of_no_first_microbatch(any_megatron_lm):
    """What ``mcore/model/te.py`` relies on: wrappers pass None if the transpose cache is disabled."""
    file = any_megatron_lm / "megatron/core/extensions/transformer_engine.py"
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    passed = [
        ast.unparse(keyword.value)
        for node in nodes
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "is_first_microbatch"
    ]
    values = [
        ast.unparse(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_is_first_microbatch"
    ]
    assert passed == ["_is_first_microbatch"] * 3, "linear, with a norm before it, grouped"
    assert values == ["None if self.disable_parameter_transpose_cache else self.is_first_microbatch"] * 3
