"""What a job's processes have open: more connections than shells allow at first, and all standard streams."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys

import pytest

from odyssey_megatron.launch.process.open_files import check_many
from tests.launch.jobserver import CHECKOUT, events, wait_for
from tests.surroundings.trees import tree


def limited(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def start(tmp_path, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    """A job of twelve ranks."""
    job = [
        *(
            "--preload",
            "tests.launch.preload",
            "--nproc-per-node",
            "12",
            "tests/launch/toy.py",
            "--steps",
            "5",
        ),
        *("--odyssey-device", "cpu", "--odyssey-run-dir", str(tmp_path / "run")),
    ]
    return subprocess.run(
        [sys.executable, "-m", "odyssey_megatron", "run", *job], capture_output=True, text=True, timeout=120,
        cwd=CHECKOUT, preexec_fn=lambda: limited(soft, hard),
    )  # fmt: skip


def test_a_job_uses_what_the_hard_limit_has(tmp_path):
    """Each rank has two connections to the job's store."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 500:
        pytest.skip(f"no more than {hard} files may be open here")
    job = start(tmp_path, 50, hard)
    assert job.returncode == 0, job.stderr
    assert "Raise it" not in job.stderr


def test_a_hard_limit_that_is_too_low_is_said(monkeypatch, capfd):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 1024))
    check_many(256, 32)
    assert capfd.readouterr().err == ""
    check_many(512, 64)
    assert "where 512 ranks of 64 node(s) meet; the limit is 1024. Raise it" in capfd.readouterr().err


def test_a_script_calls_the_command_though_its_standard_streams_are_closed():
    script = "import sys; from odyssey_megatron.cli import main; sys.exit(main(['--version']))"
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", script]
    assert subprocess.run(command, cwd=CHECKOUT, timeout=60).returncode == 0


def test_a_script_s_own_file_at_the_number_of_a_closed_stream_is_left_alone(tmp_path):
    """Without descriptor 1 the first file that the script opens gets the number."""
    script = (
        "import sys; from odyssey_megatron.cli import main; file = open(sys.argv[1], 'w')\n"
        "code = main(['--version']); print('more'); sys.stdout.flush()\n"
        "file.write(str(file.fileno())); sys.exit(code)"
    )
    command = ["sh", "-c", 'exec "$@" 1>&-', "sh", sys.executable, "-c", script, str(tmp_path / "own")]
    assert subprocess.run(command, cwd=CHECKOUT, timeout=60).returncode == 0
    assert (tmp_path / "own").read_text() == "1"


PRELOAD = "--preload tests.launch.preload"


@pytest.mark.parametrize(("closed", "flags"), [("2", ""), ("012", PRELOAD)])
def test_a_job_runs_whose_standard_streams_are_closed(tmp_path, closed, flags):
    """As by "2>&-". A connection to the store would get the number 2, and what C++ prints there."""
    go, run = tmp_path / "go", tmp_path / "run"
    command = [sys.executable, "-m", "odyssey_megatron", "run", *flags.split(), "--nproc-per-node", "2"]
    command += ["tests/launch/toy.py", "--pipeline", "1", "--hold", str(go)]
    command += ["--odyssey-device", "cpu", "--odyssey-run-dir", str(run)]
    closing = " ".join(f"{number}>&-" for number in closed)
    job = subprocess.Popen(["sh", "-c", f'exec "$@" {closing}', "sh", *command], cwd=CHECKOUT)
    try:
        wait_for((tmp_path / "go.waits").exists, 60, "the job trains")
        ranks = [one["pid"] for one in events(run, "rank_started")]
        for pid in (job.pid, *ranks):
            assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in closed} == {os.devnull}
        go.touch()
        assert job.wait(60) == 0
        assert len(events(run, "step_committed")) == 2
    finally:
        for pid in (job.pid, *tree(job.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
