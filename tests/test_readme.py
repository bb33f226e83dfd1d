"""What the documentation says about the code is true of the code."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_the_shell_that_writes_the_exit_code_outlives_a_signal_to_all_processes(checkout, tmp_path, number):
    """As Slurm sends it: the shell's death would end the job before it has saved."""
    (line,) = re.findall(
        r"`([^`]*odyssey run \.\.\.; echo \$\? > FILE)`", (checkout / "docs/running.md").read_text()
    )
    saves = f"import signal, sys; signal.signal({number:d}, lambda *_: sys.exit(92)); print(flush=True); signal.pause()"
    file = tmp_path / "code"
    line = line.replace("odyssey run ...", shlex.join([sys.executable, "-c", saves])).replace(
        "FILE", str(file)
    )
    shell = subprocess.Popen(["bash", "-c", line], stdout=subprocess.PIPE, start_new_session=True)
    assert shell.stdout is not None
    shell.stdout.readline()
    os.killpg(shell.pid, number)
    shell.communicate(timeout=20)
    assert (shell.returncode, file.read_text()) == (0, "92\n")
