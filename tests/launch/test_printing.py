"""What a rank prints is there, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from odyssey_megatron.launch.process.printing import _Spared
from odyssey_megatron.launch.process.zygote import Zygote
from tests.launch.jobserver import CHECKOUT

DIES = """
import os, signal, sys
from odyssey_megatron.launch.process import printing
printing.spare()
print("a line")
print("...", end="", flush=True)
sys.stderr.write("an error\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=["python -u", "a zygote"])
def run(request, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    script, out, err = (tmp_path / name for name in ("script.py", "out", "err"))

    def forked(text):
        script.write_text(text)
        zygote = Zygote.spawn(["decimal"], env)
        try:
            return zygote.run(["-u", str(script)], env=env, stdout=str(out), stderr=str(err)).wait(30)
        finally:
            zygote.close()

    def fresh(text):
        script.write_text(text)
        with out.open("wb") as stdout, err.open("wb") as stderr:
            return subprocess.run(
                [sys.executable, "-u", str(script)], env=env, stdout=stdout, stderr=stderr, timeout=30
            ).returncode

    way = forked if request.param == "a zygote" else fresh
    return lambda text: (way(text), out.read_text(), err.read_text())


def test_what_a_rank_has_printed_is_there_when_it_is_killed(run):
    assert run(DIES) == (-9, "a line\n...", "an error\n")


TALKS = """
from odyssey_megatron.launch.process import printing
printing.spare()
for number in range(3000):
    print("rank", number, "of", 3000)
"""


def test_lines_of_several_ranks_do_not_get_into_one_another(tmp_path):
    (script := tmp_path / "script.py").write_text(TALKS)
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    with (tmp_path / "out").open("ab") as out:
        zygote = Zygote.spawn(["decimal"], env)
        fresh = [subprocess.Popen([sys.executable, "-u", str(script)], env=env, stdout=out) for _ in range(2)]
        forked = [
            zygote.run(["-u", str(script)], env=env, stdout=out.name, stderr=out.name) for _ in range(2)
        ]
        assert [one.wait(30) for one in [*fresh, *forked]] == [0] * 4
        zygote.close()
    lines = (tmp_path / "out").read_text().splitlines()
    assert sorted(lines) == sorted(4 * [f"rank {number} of 3000" for number in range(3000)])


def test_without_u_lines_are_kept_back_as_python_does(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DIES.replace(", flush=True", "")],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        timeout=30,
    )
    assert (done.stdout, done.stderr) == (b"", b"an error\n")


def test_what_a_full_pipe_takes_no_more_is_counted():
    """A part of it is written. The rest, of which nobody above would know, is lost."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    stream = _Spared(sink)
    text = b"12345\n" * 100_000
    assert stream.write(text) == len(text)
    for piece in (b"a line", b"\n"):  # as print writes it
        assert stream.write(piece) == len(piece)
    taken = os.read(source, len(text))
    assert text.startswith(taken)
    missing = text[len(taken) :].count(b"\n") + 1
    stream.write(b"the end\n")
    why = "as they could not be written (Resource temporarily unavailable)"
    assert (
        os.read(source, 1000).decode() == f"[odyssey] {missing} line(s) are missing here, {why}.\nthe end\n"
    )
    os.close(source)
    os.close(sink)
