"""The list of what Megatron-LM decides by device names lines that are there, and tests that are."""

from __future__ import annotations

import re
from itertools import takewhile

from tests.launch.jobserver import CHECKOUT

ROW = re.compile(r"\| `(?P<path>[\w/.]+):(?P<line>\d+)` `(?P<text>[^`]+)` \|.*\| (?P<waits>[^|]+) \|")


def rows():
    lines = (CHECKOUT / "docs/devices.md").read_text().splitlines()
    return [ROW.fullmatch(line) for line in takewhile(bool, lines[13:])]


def test_each_row_names_its_line_and_what_waits_for_it():
    found = rows()
    assert all(found)
    assert len(found) > 20
    assert {re.sub(r" \(.*\)", "", one["waits"]) for one in found} == {
        "jobs",
        "jobs of Megatron-LM's",
        "TE",
        "–",
    }


def test_the_lines_are_those_of_the_checkout(megatron_lm):
    wrong = []
    for one in rows():
        lines = (megatron_lm / "megatron" / one["path"]).read_text().splitlines()
        if lines[int(one["line"]) - 1].strip() != one["text"]:
            wrong.append((one["path"], one["line"], lines[int(one["line"]) - 1].strip()))
    assert not wrong
