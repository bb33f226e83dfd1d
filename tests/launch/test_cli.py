"""``odyssey inject`` on a running job."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest

import odyssey_megatron
from odyssey_megatron import cli
from odyssey_megatron.config import OdysseyConfig, flag_of
from odyssey_megatron.launch import inject
from odyssey_megatron.metrics import journal
from odyssey_megatron.metrics.journal import Journal
from tests.launch.jobserver import events, wait_for
from tests.launch.test_survival import check


@pytest.mark.parametrize("name", ["KILL", "STOP"])
def test_inject_into_a_running_job(toy, tmp_path, name, capsys):
    job = toy(4, "--steps", 30, "--hold", tmp_path / "go", "--odyssey-hang-s", 0.8)
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 20, "all ranks in their groups")
    assert cli.main(["inject", str(tmp_path / "run"), "--rank", "2", "--signal", name]) == 0
    assert f"sent SIG{name} to rank 2" in capsys.readouterr().out
    (tmp_path / "go").touch()
    check(job, tmp_path, steps=30, survivors={0, 1, 3})
    assert cli.main(["inject", str(tmp_path / "run"), "--rank", "2"]) == 2
    assert "is not running" in capsys.readouterr().err


def test_inject_into_an_unknown_rank(tmp_path, capsys):
    assert cli.main(["inject", str(tmp_path / "run"), "--rank", "9"]) == 2
    assert "no record of a rank 9" in capsys.readouterr().err


def test_inject_spares_a_process_that_got_the_pid_later(tmp_path, capsys, monkeypatch):
    Journal(tmp_path / "run", source="agent0").event("rank_started", target=0, pid=1)
    monkeypatch.setattr(inject, "_started_s", lambda pid: float("inf"))
    assert cli.main(["inject", str(tmp_path / "run"), "--rank", "0"]) == 2
    assert "is not running" in capsys.readouterr().err


def test_inject_spares_a_process_of_this_host_if_the_rank_is_on_another(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(journal, "clock", lambda: "the other host's")
    with subprocess.Popen(["sleep", "60"]) as bystander:
        Journal(tmp_path / "run", source="agent1").event("rank_started", target=0, pid=bystander.pid)
        monkeypatch.undo()
        assert cli.main(["inject", str(tmp_path / "run"), "--rank", "0"]) == 2
        assert "is not running on this machine" in capsys.readouterr().err
        assert bystander.poll() is None
        bystander.kill()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_that_is_to_be_slow_stands_still_by_turns_and_is_let_go(tmp_path, capsys):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as rank:
        Journal(tmp_path / "run", source="agent0").event("rank_started", target=0, pid=rank.pid)
        argv = ["inject", str(tmp_path / "run"), "--rank", "0", "--slow", "4"]
        by_hand = [sys.executable, "-m", "odyssey_megatron", *argv]
        with subprocess.Popen(by_hand, stdout=subprocess.PIPE) as robber:
            for state in "TRTR":
                wait_for(lambda state=state: state_of(rank.pid) == state, 20, f"state {state}")
            robber.terminate()
            assert robber.wait(20) == 0
        assert state_of(rank.pid) != "T"
        assert cli.main([*argv, "--for-s", "0.2"]) == 0
        assert f"rank 0 (pid {rank.pid}) is as fast as before" in capsys.readouterr().out
        assert state_of(rank.pid) != "T"
        threading.Timer(0.3, lambda: (rank.kill(), rank.wait())).start()
        assert cli.main(argv) == 0
        assert f"rank 0 (pid {rank.pid}) has ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--slow", "3", "--signal", "KILL"), "leave one of them out"),
        (("--for-s", "3"), "give --slow, too"),
        (("--slow", "0.5"), "--slow"),
    ],
)
def test_inject_says_what_it_cannot_do(tmp_path, capsys, flags, why):
    Journal(tmp_path / "run", source="agent0").event("rank_started", target=0, pid=1)
    assert cli.main(["inject", str(tmp_path / "run"), "--rank", "0", *flags]) == 2
    assert why in capsys.readouterr().err


def test_says_its_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"odyssey-megatron {odyssey_megatron.__version__}\n"


def test_its_module_is_the_command_too():
    argv = [sys.executable, "-m", "odyssey_megatron.cli", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"odyssey-megatron {odyssey_megatron.__version__}\n"


def test_a_full_disk_under_what_is_printed_is_said():
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "odyssey_megatron", "--help"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "odyssey: what this command prints could not be written: No space left on device. Make room, or write "
        "elsewhere.\n"
    )


@pytest.mark.parametrize("name", ["run", "join"])
def test_help_names_its_command(name, capsys):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: odyssey {name} ")
    for setting in fields(OdysseyConfig):  # errors refer to it
        assert f"\n  {flag_of(setting)} " in said
