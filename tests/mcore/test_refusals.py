"""The table of refused flags in docs/flags.md is the one that jobs are held to."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore import autoload
from odyssey_megatron.mcore.loop.arguments import early, refused_by_megatron
from odyssey_megatron.upstream.refusals import REFUSALS

BEGIN, END = r"<!-- refused: begin[^>]*-->\n", r"<!-- refused: end -->"


def refused_table() -> str:
    rows: dict[tuple[str, str, str], list[str]] = {}
    for one in REFUSALS:
        told = one.why, one.since.replace("core_v", "") or "never", one.remedy
        rows.setdefault(told, []).append(f"`{one.flag}`" if one.flag.startswith("--") else one.flag)
    lines = ["| refused | why | could work from | what to do |", "|---|---|---|---|"]
    for told, flags in rows.items():
        cells = [", ".join(flags), *(one.replace("|", "\\|") for one in told)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_table_in_the_documentation_is_that_of_the_code(checkout):
    match = re.search(BEGIN + "(.*?)" + END, (checkout / "docs" / "flags.md").read_text(), re.DOTALL)
    assert match is not None
    assert match.group(1) == refused_table(), "paste this into docs/flags.md:\n" + refused_table()


def test_what_megatron_asserts_is_one_sentence():
    with (
        pytest.raises(ConfigError, match=r"cannot be used in this mode\. Change them"),
        refused_by_megatron(),
    ):
        raise AssertionError("It cannot be used in this mode.")


def test_flags_of_a_checkpoint_that_no_flag_names_are_bad_input(monkeypatch):
    args = SimpleNamespace(use_checkpoint_args=True, load=None, pretrained_checkpoint=None)
    for name in ("megatron.training", module := "megatron.training.arguments"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[module], "parse_args", lambda **kwargs: args, raising=False)
    with pytest.raises(ConfigError, match="^--use-checkpoint-args .* no flag names one. Add --load"):
        early()
    args.load = "saved"
    assert early() is None


@pytest.mark.skipif(bool(importlib.util.find_spec("megatron.training")), reason="it is there")
def test_a_script_without_megatron_s_training_loop_is_told_where_that_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--odyssey", "--odyssey-device", "cpu"])
    with pytest.raises(SystemExit):
        autoload.import_training()
    told = capsys.readouterr().err
    assert "megatron.training cannot be imported" in told
    assert (
        "put the checkout into PYTHONPATH. A script that trains with TrainingJob needs no --odyssey" in told
    )
