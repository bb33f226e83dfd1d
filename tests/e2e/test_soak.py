"""What the soak (``soak.py``) looks with."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess

import pytest

from odyssey_megatron.metrics.lines import Lines
from tests.e2e.around import Around, left_behind, listening, small_disk
from tests.e2e.soak import Gunman, Tail, printed_difference, twice_or_not
from tests.e2e.test_leaks import usage
from tests.launch.jobserver import CHECKOUT, events, pid_of, wait_for


def test_what_has_ended_is_said_to_have_ended(tmp_path):
    job = subprocess.Popen(["true"])
    gunman = Gunman(job, Tail(tmp_path / "run", tmp_path / "seen"), 1)
    os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)  # the kernel still knows of it
    with pytest.raises(ProcessLookupError, match=f"process {job.pid} has ended"):
        usage(job.pid)
    with pytest.raises(SystemExit, match="the job has ended with exit code 0 after 0 kills"):
        gunman._usage()


def test_nothing_is_lost_of_a_journal_whose_folder_is_deleted(tmp_path):
    run_dir, kept = tmp_path / "run", tmp_path / "seen"
    tail, written = Tail(run_dir, kept), Lines(run_dir / "journal" / "rank0.jsonl")

    def write(step: int) -> None:
        written.write(json.dumps({"event": "step_committed", "wall_s": step, "step": step}).encode() + b"\n")

    def seen() -> list[int]:
        return [event["step"] for event in tail.more()]

    write(0)
    assert seen() == [0]
    write(1)
    shutil.rmtree(run_dir)
    write(2)
    assert seen() == [0, 1, 2]
    shutil.rmtree(run_dir)
    assert seen() == [0, 1, 2]
    write(3)
    with (run_dir / "journal" / "rank0.jsonl").open("ab") as torn:
        torn.write(b'{"event":"step_co')
    assert seen() == [0, 1, 2, 3]
    lines = (kept / "journal" / "rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_the_ports_that_a_process_listens_on():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {one.getsockname()[1], other.getsockname()[1]}
        with socket.create_connection(one.getsockname()) as line:
            found = set(listening(os.getpid()))
            assert ports <= found
            assert line.getsockname()[1] not in found


def test_iterations_and_losses_as_printed():
    printed = {1: [5.0], 2: [4.0, 4.0], 4: [3.0]}
    assert twice_or_not(printed, 4) == 2
    assert printed_difference({1: [5.0]}, {1: [4.0]}) == 0.25
    assert printed_difference({1: [5.0]}, {}) == float("inf")
    assert printed_difference({}, {}) == float("inf")
    known = {1: [5.0], 2: [4.0]}
    assert printed_difference(known | {2: [float("nan")]}, known) == float("inf")


def test_what_is_left_behind(tmp_path):
    (tmp_path / "torchinductor_root").mkdir()
    assert left_behind({os.getpid()}, tmp_path) == []
    (tmp_path / "torchelastic_x").mkdir()
    assert left_behind(set(), tmp_path) == [str(tmp_path / "torchelastic_x")]


@pytest.mark.matrix
@pytest.mark.timeout(200)
@pytest.mark.parametrize("what", ["frozen", "full_disk", "deleted_folder", "strangers"])
def test_a_rank_is_killed_in_what_goes_wrong_around_a_job(server, tmp_path, what):
    with small_disk(tmp_path / "disk") as disk:
        run_dir, go = disk.path / "run", tmp_path / "go"
        flags = ("--steps", 60, "--hold", go, "--odyssey-device", "cpu", "--odyssey-hang-s", 2)
        script = ("--nproc-per-node", 4, CHECKOUT / "tests/launch/toy.py", *flags)
        job = server.run([*script, "--odyssey-run-dir", run_dir], log=tmp_path / "log")
        wait_for(lambda: len(events(run_dir, "recovered")) == 4, 60, "all ranks in their groups")
        pid = pid_of(run_dir, 2)
        with getattr(Around(job.pid, run_dir, disk, random.Random(1)), what)():
            os.kill(pid, signal.SIGKILL)
        go.touch()
        assert job.wait(90) == 0, job.log()
        assert "dead=2" in job.log()
        assert {event["rank"] for event in events(run_dir, "step_committed")} == {0, 1, 3}
