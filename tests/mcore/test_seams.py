"""Replacing names in the imported Megatron."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from odyssey_megatron.errors import MegatronIncompatible
from odyssey_megatron.upstream import compat, seam_table, seams
from odyssey_megatron.upstream.seams import Seam
from odyssey_megatron.upstream.source import Source

INSTALLED = Source(tuple(Path(folder).parent for folder in pytest.importorskip("megatron").__path__))


def undo_all():
    while seams._applied:
        owner, name, before, after = seams._applied.popitem()[1]
        seams._exchange(owner, name, after, before)


@pytest.fixture
def untouched(megatron):
    """Other tests of this process may have applied seams, which stay."""
    before = dict(seams._applied)
    undo_all()
    yield
    undo_all()
    for owner, name, old, new in before.values():
        seams._exchange(owner, name, old, new)
    seams._applied.update(before)


@pytest.mark.parametrize(
    "seam",
    [one for one in seam_table.SEAMS if one.target.startswith("megatron.core")],
    ids=lambda one: one.target,
)
def test_the_installed_megatron_core_has_the_seam(seam, untouched):
    version = compat.check_version()
    live = seams.check_live(seam, version)
    assert live.state == ("unused" if seam.expected(version) is None else "ok")
    assert live == seams.check(seam, INSTALLED, version), "source and object are told apart"


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ("from typing import of_a_newer_python", "cannot import name 'of_a_newer_python'"),
        ("import of_nobody", "of_nobody"),
    ],
)
def test_a_module_that_cannot_be_imported_is_no_missing_name(tmp_path, monkeypatch, imports, found):
    (tmp_path / "needy.py").write_text(imports)
    monkeypatch.syspath_prepend(tmp_path)
    seam = Seam(target="needy:name", why="", signatures={"0.16": ""})
    with pytest.raises(
        MegatronIncompatible, match=f"needy of megatron-core 0.16.1 cannot be imported .*{found}"
    ):
        seams.check_live(seam, "0.16.1")
    assert (
        seams.check_live(Seam(target="needier:name", why="", signatures={"0.16": ""}), "0.16.1").state
        == "missing"
    )


def test_a_replacement_reaches_every_copy(untouched):
    from megatron.core.transformer import transformer_block

    layer_specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    script = types.ModuleType("script")
    before = transformer_block.get_num_layers_to_build
    script.renamed = before
    sys.modules["script"] = script
    try:
        seams.wrap(seam_table.GET_NUM_LAYERS_TO_BUILD, lambda original, *args: (original, args))
        for function in (
            transformer_block.get_num_layers_to_build,
            layer_specs.get_num_layers_to_build,
            script.renamed,
        ):
            assert function(1, 2) == (before, (1, 2))
        assert seams.original(seam_table.GET_NUM_LAYERS_TO_BUILD) is before
    finally:
        del sys.modules["script"]


def test_a_static_method_stays_one(untouched):
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    seams.apply(seam_table.CALCULATE_LOGITS_MAX, lambda logits: ("ours", logits))
    assert VocabParallelCrossEntropy().calculate_logits_max(5) == ("ours", 5)


@pytest.mark.parametrize(
    ("name", "why"),
    [("backward_step", "is changed"), ("backwards_step", "is missing")],
)
def test_a_seam_that_does_not_fit_is_refused_and_nothing_is_replaced(untouched, name, why):
    from megatron.core.pipeline_parallel import schedules

    seam = Seam(
        target=f"megatron.core.pipeline_parallel.schedules:{name}",
        why="to test",
        signatures={"0.16": "first second"},
    )
    before = schedules.backward_step
    with pytest.raises(MegatronIncompatible, match=f"{name} {why}.*first, second.*found"):
        seams.apply(seam, print)
    assert schedules.backward_step is before
    assert not seams.is_applied(seam)
