"""What the documentation says about the code is true of the code."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from odyssey_megatron.config import OdysseyConfig, choices_of, flag_of

DOCS = [
    f"docs/{name}.md"
    for name in (
        "devices",
        "flags",
        "measurements",
        "not-yet",
        "recovery",
        "running",
        "threat-model",
        "versions",
    )
]
BEGIN, END = r"<!-- flags: begin[^>]*-->\n", r"<!-- flags: end -->"


def flags_table() -> str:
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for one in fields(OdysseyConfig):
        choices = choices_of(one)
        meaning = (f"{', '.join(choices)}: " if choices else "") + one.metadata["help"]
        default = f"`{one.default}`" if one.default != "" else ""
        lines.append(f"| `{flag_of(one)}` | {default} | {meaning.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def test_the_flags_table_is_the_dataclass(checkout):
    match = re.search(BEGIN + "(.*?)" + END, (checkout / "docs" / "flags.md").read_text(), re.DOTALL)
    assert match is not None
    assert match.group(1) == flags_table(), "paste this into docs/flags.md:\n" + flags_table()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", *DOCS])
def test_files_that_are_named_exist(checkout, document):
    text = (checkout / document).read_text()
    named = set(re.findall(r"\b(?:odyssey_megatron|tests|examples|docs|\.ci)/[\w/.-]*\w", text))
    missing = sorted(name for name in named if not (checkout / name).exists())
    assert not missing


def test_the_first_screen_of_the_readme_says_what_to_type(checkout):
    first = "\n".join((checkout / "README.md").read_text().splitlines()[:30])
    for text in ("examples/llama/demo.sh", "tests/run.sh", "recover.py", "launch/"):
        assert text in first
