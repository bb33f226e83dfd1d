"""What a job prints, where nobody reads it, or nobody any more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from odyssey_megatron.launch.process.tap import _Tap
from tests.launch.jobserver import wait_for
from tests.launch.test_survival import check

PRINTS = """
import os, sys, time
from odyssey_megatron.launch.process import tap
with tap.before(1, 2):
    for line in range({lines}):
        print(f"line {{line}} {{'x' * 1000}}", flush=True)
    sys.stderr.write("the last word\\n")
    {then}
"""


def start(lines: int, then: str = "", *, together: bool = True) -> subprocess.Popen[bytes]:
    program = PRINTS.format(lines=lines, then=then)
    stderr = subprocess.STDOUT if together else subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr)


def test_who_reads_late_has_the_newest_lines_and_the_number_of_the_others():
    process = start(20_000)
    assert process.wait(30) == 0, "it does not wait for a reader"
    text = process.stdout.read().decode()
    lines = re.findall(r"^line (\d+) x{1000}$", text, re.M)
    (missing,) = re.findall(
        r"^\[odyssey\] (\d+) line\(s\) are missing here, as nobody read them\.$", text, re.M
    )
    assert len(lines) + int(missing) == 20_000
    assert lines[0] == "0"
    assert lines[-1] == "19999"
    assert 1 << 20 < len(text) < 5 << 20
    assert text.endswith("the last word\n")


def test_who_reads_at_once_has_everything_in_order():
    process = start(20_000, together=False)
    out, err = process.communicate(timeout=30)
    assert re.findall(rb"line (\d+)", out) == [b"%d" % line for line in range(20_000)]
    assert (err, process.returncode) == (b"the last word\n", 0)


def test_who_pauses_for_a_moment_has_everything_too():
    process = start(20_000)
    assert os.read(process.stdout.fileno(), 1) == b"l"
    time.sleep(0.3)
    out, _ = process.communicate(timeout=30)
    assert re.findall(rb"ine (\d+)", out) == [b"%d" % line for line in range(20_000)]


def test_all_is_written_when_the_launcher_has_ended():
    """Who ends a container ends all that is in it with its first process."""
    # A pipe that nobody reads yet has room for 16 pages, and each line may begin another one.
    process = start(5, "print('x' * 30_000)")
    began_s = time.monotonic()
    assert process.wait(30) == 0
    os.set_blocking(process.stdout.fileno(), False)
    text = process.stdout.read()
    assert text.endswith(b"x" * 30_000 + b"\n"), text[-100:]
    assert time.monotonic() - began_s < 20


def test_what_is_killed_loses_no_line_that_it_has_printed():
    process = start(100, "os.kill(os.getpid(), 9)")
    process.wait(30)
    assert process.stdout.read().decode().endswith("the last word\n")


def test_nobody_reads_any_more():
    process = start(1, "time.sleep(0.5); [print('x' * 1000, flush=True) for _ in range(100)]; sys.exit(7)")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30) == 7, "no broken pipe"


def test_a_line_that_has_no_end_is_passed_on():
    process = start(0, "print('50 %', end='', flush=True); time.sleep(60)", together=False)
    began_s = time.monotonic()
    assert os.read(process.stdout.fileno(), 100) == b"50 %"
    assert time.monotonic() - began_s < 30
    process.kill()
    process.wait()


def test_lines_are_lost_whole():
    tap = _Tap(kept_bytes=100)
    tap.take(b"begun")
    assert tap.next() == b"begun"
    tap.wrote(2)
    lines = [b", ended", *(b"%09d" % number for number in range(100))]
    tap.take(b"\n".join(lines) + b"\n")
    written = b"be"
    while data := tap.next():
        written += data
        tap.wrote(len(data))
    first, note, *rest = written.splitlines()
    assert (first, rest) == (b"begun", lines[-len(rest) :])
    assert note == b"[odyssey] %d line(s) are missing here, as nobody read them." % (len(lines) - len(rest))
    assert 3 <= len(rest) <= 10


@pytest.mark.usefixtures("server")
def test_a_job_whose_output_nobody_reads(server, tmp_path):
    """Neither its ranks nor its agent wait: a death is noticed, and the job ends."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    job = server.run(
        ["--nproc-per-node", 4, "tests/launch/toy.py", "--steps", 30, "--chatter", 300_000, "--odyssey-device", "cpu",
         "--odyssey-run-dir", tmp_path / "run", "--odyssey-inject", "rank=2,step=20,at=forward"],
        log=pipe,
    )  # fmt: skip
    job.log_path = tmp_path / "none"
    check(job, tmp_path, steps=30, survivors={0, 1, 3})
    text = b""

    def read() -> bool:
        nonlocal text
        part = os.read(reader, 1 << 20)
        text += part
        return not part

    os.set_blocking(reader, True)
    wait_for(read, 20, "the end of the output")
    assert b"line(s) are missing here" in text
    assert b"step 29: xxx" in text
