"""What cannot work is said in one paragraph, with exit code 2, before anything is trained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from odyssey_megatron import cli
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch import line
from odyssey_megatron.launch.wire.verdict import ENDS_S, TERMINATE_S, JobVerdict
from tests.launch.jobserver import CHECKOUT, events, wait_for


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--odyssey-policy", "guess"], "--odyssey-policy 'guess' is unknown"),
        (["--odyssey-polcy", "auto"], "unknown flag --odyssey-polcy"),
        (["--odyssey-inject", "rank=4,step=1,at=forward"], "names rank 4, but the job has ranks 0 to 3"),
        (["--odyssey-inject", "rank=1,step=1,at=lunch"], "at=lunch is unknown"),
        (["--odyssey-hang-s", "0"], "a number from 0.001 to 1,000,000 is expected, found 0"),
    ],
)
def test_flags(toy, arguments, message):
    job = toy(4, *arguments)
    assert job.wait(20) == 2, job.log()
    assert message in job.log()
    assert "Traceback" not in job.log()
    assert len(job.log().strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node", "xpu"], "Xpu is not available"),
        (["--rdzv-backend", "nope"], "--rdzv-backend nope is unknown; torch knows c10d,"),
        (
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:x"],
            "endpoint 'localhost:x' must be an integer",
        ),
        (["--rdzv-conf", "broken"], "option 'broken' must have a value"),
        (["--logs-specs", "nope"], "torchrun.logs_specs[nope]"),
        (["--local-ranks-filter", "a"], "must be a comma-separated list of integers"),
        (["--log-dir", "/proc/nowhere"], "/proc/nowhere"),
        (["--numa-binding", "node"], "--numa-binding node binds ranks to the cores beside their GPUs"),
        (["--signals-to-handle", "SIGTERM,NOPE"], "names as in SIGTERM,SIGUSR1 are expected, found 'NOPE'"),
        (["--event-log-handler", "nope"], "as null or console, is expected, found 'nope'"),
        (["--run-path"], "--run-path runs the script within the launcher's own interpreter"),
        (["--no-python"], "there is no such program that may be executed"),
    ],
)
def test_arguments_that_torchrun_would_refuse_with_a_traceback(
    tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    script = tmp_path / "script.py"
    script.touch(mode=0o644)

    def read() -> None:
        args = line.parse([*arguments, str(script)], "odyssey run")
        line.check_script(args)
        line.for_torch(args)

    with pytest.raises((ConfigError, SystemExit)) as refused:
        read()
    if isinstance(refused.value, SystemExit):  # by the parser
        assert refused.value.code == 2
    assert message in f"{refused.value}{capsys.readouterr().err}"


def test_what_torchrun_refuses_is_one_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import odyssey_megatron")  # or it is told that --odyssey is missing
    command = [sys.executable, "-m", "odyssey_megatron", "run", "--rdzv-conf", "broken", str(script)]
    flags = ["--odyssey-device", "cpu", "--odyssey-run-dir", str(tmp_path / "run")]
    run = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, cwd=CHECKOUT)
    assert run.returncode == 2
    assert len(run.stderr.strip().splitlines()) == 1


def test_copies_of_output_without_a_folder_for_them(tmp_path):
    """torch would open them in /dev/null, which is no folder."""
    script = tmp_path / "script.py"
    script.touch()
    command = [
        sys.executable,
        "-m",
        "odyssey_megatron",
        "run",
        "--duplicate-stdout-filters",
        "loss",
        str(script),
    ]
    flags = ["--odyssey-device", "cpu", "--odyssey-run-dir", str(tmp_path / "run")]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=60, env=environ, cwd=CHECKOUT
    )
    assert run.returncode == 0, run.stderr


def test_preloading_for_cuda(capsys):
    assert cli.main(["run", "--preload", "torch", "script.py", "--odyssey-device", "cuda"]) == 2
    assert "CUDA does not survive a fork" in capsys.readouterr().err


def test_several_nodes_need_a_secret(capsys, monkeypatch):
    monkeypatch.delenv("ODYSSEY_TOKEN", raising=False)
    assert cli.main(["run", "--nnodes", "2", "script.py"]) == 2
    assert "ODYSSEY_TOKEN" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--odyssey", "--odyssey=observe", "--odyssey-respawn"])
def test_flags_before_the_script(capsys, flag):
    assert cli.main(["run", "--nproc-per-node", "2", flag, "script.py"]) == 2
    assert "Odyssey's flags come behind the script" in capsys.readouterr().err


def test_a_range_of_nodes(capsys):
    assert cli.main(["run", "--nnodes", "1:4", "script.py"]) == 2
    assert "fixed number of nodes" in capsys.readouterr().err


def test_all_ranks_refuse_and_one_message_is_shown(toy, tmp_path):
    job = toy(4, "--refuse", "no such dataset: give another --data-path.")
    assert job.wait(20) == 2, job.log()
    assert job.log().count("no such dataset") == 1
    assert "Traceback" not in job.log()
    assert not events(tmp_path / "run", "decision")


def test_ranks_that_were_started_for_different_jobs(toy):
    job = toy(4, "--differ")
    assert job.wait(20) == 2, job.log()
    assert job.log().count("the ranks were not started for the same job") == 1


def test_a_world_that_does_not_divide(toy):
    job = toy(3, "--pipeline", 2)
    assert job.wait(20) == 2, job.log()
    assert job.log().count("not divisible by --pipeline-model-parallel-size 2") == 1


def test_a_script_that_fails_before_it_joins(server, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os, sys\nsys.exit(5 if os.environ['RANK'] == '1' else 0)\n")
    job = server.run(["--nproc-per-node", 3, script, "--odyssey-device", "cpu",
                      "--odyssey-run-dir", tmp_path / "run"], log=tmp_path / "log")  # fmt: skip
    assert job.wait(20) == 5, job.log()
    assert (
        "rank 1 ended with exit code 5; the script never joined the job (is --odyssey missing?)" in job.log()
    )
    assert "Nothing was trained" not in job.log(), "it may have trained for days"


CLEANS_UP = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def clean_up(number, frame):
    time.sleep(ENDS_S + 1)
    (folder / "clean").touch()
    sys.exit()
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, clean_up)
    (folder / "ready").touch()
    time.sleep(60)
while not (folder / "ready").exists():
    time.sleep(0.02)
sys.exit(5)
"""


@pytest.mark.parametrize("given", [True, False])
def test_a_script_has_the_time_to_clean_up_that_it_is_given(server, tmp_path, given):
    script = tmp_path / "cleans_up.py"
    script.write_text(CLEANS_UP.replace("ENDS_S", str(ENDS_S)))
    launch = ["--nproc-per-node", 2, *(("--shutdown-timeout", 30) if given else ())]
    flags = ["--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run"]
    job = server.run([*launch, script, tmp_path, *flags], log=tmp_path / "log")
    assert job.wait(20) == 5, job.log()
    assert (tmp_path / "clean").exists() == given


def test_a_script_without_odyssey_has_torchrun_s_time_to_clean_up_after_a_signal(server, tmp_path):
    script = tmp_path / "cleans_up.py"
    script.write_text(CLEANS_UP.replace("ENDS_S", str(TERMINATE_S)).replace("sys.exit(5)", "time.sleep(60)"))
    flags = ["--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run"]
    job = server.run(["--nproc-per-node", 2, script, tmp_path, *flags], log=tmp_path / "log")
    wait_for((tmp_path / "ready").exists, 20, "the script runs")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(20) == 128 + signal.SIGTERM, job.log()
    assert (tmp_path / "clean").exists()


def test_a_second_signal_leaves_no_time_whatever_is_given():
    assert JobVerdict(code=143, terminate_s=0.0).leaves_s(30) == 0
    assert JobVerdict(code=1).leaves_s(30) == 30
    assert JobVerdict(code=1).leaves_s(0) == 0
    assert JobVerdict(code=1).leaves_s(None) == ENDS_S


def test_a_script_that_never_joins(server, tmp_path):
    """As under torchrun: all exit with 0, so does the job."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, sys\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1])\n"
    )
    job = server.run(["--nproc-per-node", 2, script, "hello", "--odyssey-device", "cpu",
                      "--odyssey-run-dir", tmp_path / "run"], log=tmp_path / "log")  # fmt: skip
    assert job.wait(20) == 0, job.log()
    assert sorted(line for line in job.log().splitlines() if line.startswith("rank")) == [
        "rank 0 of 2 hello",
        "rank 1 of 2 hello",
    ]


def test_a_script_that_was_not_started_by_odyssey(tmp_path):
    toy = Path(__file__).parent / "toy.py"
    run = subprocess.run(
        [sys.executable, "-c", f"import runpy; runpy.run_path({str(toy)!r}, run_name='__main__')"],
        capture_output=True, text=True, env={"PYTHONPATH": str(toy.parents[2]), "PATH": "/usr/bin"}, timeout=60,
    )  # fmt: skip
    assert run.returncode != 0
    assert "this process was not started by 'odyssey run'" in run.stderr


ENTERS = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.argv.append("--odyssey")
from odyssey_megatron.mcore import autoload
autoload.before_megatron()
"""
"""What the first lines of a patched Megatron-LM do in a process."""


def test_a_patched_script_without_a_launcher(tmp_path):
    """It was said that megatron-core, which imports it half-way, cannot be imported."""
    script = tmp_path / "patched.py"
    script.write_text(ENTERS)
    env = {"PYTHONPATH": str(CHECKOUT), "PATH": "/usr/bin", "ODYSSEY_DEVICE": "cpu"}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith("error: this process was not started by 'odyssey run'")


def test_what_ranks_refuse_before_they_join_is_said_once(server, tmp_path):
    script = tmp_path / "patched.py"
    script.write_text(ENTERS)
    where = ["--odyssey-run-dir", tmp_path / "run"]
    job = server.run(
        ["--nproc-per-node", 4, script, *where], log=tmp_path / "log", env={"ODYSSEY_PRELOAD": ""}
    )
    assert job.wait(60) == 2, job.log()
    assert job.log().count("torch sees 0") == 1
    lines = [one for one in job.log().splitlines() if "given without --odyssey" not in one]
    assert len(lines) <= 2, job.log()


def test_unknown_command(capsys):
    assert cli.main(["fly"]) == 2
    assert "unknown command 'fly'" in capsys.readouterr().err
    assert cli.main([]) == 0
    assert "usage: odyssey COMMAND" in capsys.readouterr().out
