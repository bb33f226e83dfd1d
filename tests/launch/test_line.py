"""Where the agents of a job meet, by its launch line."""

from __future__ import annotations

import pytest

from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import EXIT_BAD_INPUT, ConfigError
from odyssey_megatron.launch import line, shim
from odyssey_megatron.launch.wire.verdict import TERMINATE_S
from tests.launch.jobserver import CHECKOUT


def met(*arguments: str, job_host: str = "", hosts: bool = False):
    args = line.parse(["--nnodes", "2", *arguments, "script.py"], "odyssey run")
    return line.meeting(args, OdysseyConfig(job_host=job_host), nodes=2, token="secret", hosts=hosts)


def test_the_first_node_hosts_unless_somebody_else_does():
    first, other = met("--master-addr", "one"), met("--master-addr", "one", "--node-rank", "1")
    assert (first.host, first.port, first.hosts, other.hosts) == ("one", 29500, True, False)
    node = met("--master-addr", "one", "--master-port", "1", job_host="head:7")
    assert (node.host, node.port, node.hosts) == ("head", 7, False)
    assert met(job_host="head:7", hosts=True).hosts


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("head", "head", 29500), ("10.0.0.1:5", "10.0.0.1", 5), ("[::1]:5", "::1", 5), ("[::1]", "::1", 29500)],
)
def test_where_a_job_is_hosted(text, host, port):
    found = met(job_host=text)
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize("text", ["head:", ":7", "head:70000"])
def test_where_nobody_can_be(text):
    with pytest.raises(ConfigError, match=f"cannot read a host and a port in '{text}'"):
        met(job_host=text)


def test_a_launcher_that_ends_with_any_node(capsys):
    """Its own processes stand on the first one."""
    argv = ["script.py", "--odyssey-job-host", "head:7"]
    assert shim._run(None, argv, nodes=1, node=0, per_node=1, address="") == EXIT_BAD_INPUT
    assert "Start odyssey run itself on each node" in capsys.readouterr().err


PLACED = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_PORT": "29500"}


def test_what_a_launcher_says_of_a_place():
    assert shim._numbers(PLACED) == (9, 16, 1, 8, 29500)
    slurm = {name: value for name, value in PLACED.items() if name != "LOCAL_WORLD_SIZE"}
    assert shim._numbers({**slurm, "SLURM_NTASKS_PER_NODE": "8"}) == (9, 16, 1, 8, 29500)


@pytest.mark.parametrize(
    "wrong",
    [
        {"LOCAL_RANK": "7"},
        {"LOCAL_WORLD_SIZE": "7"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"RANK": "17"},
        {"WORLD_SIZE": "8"},
        {"MASTER_PORT": ""},
        {"WORLD_SIZE": "many"},
    ],
)
def test_variables_of_a_launcher_that_contradict_each_other(wrong, capsys, monkeypatch):
    """Its stand-ins would wait for an agent that nobody starts."""
    monkeypatch.setattr(shim.os, "environ", PLACED | wrong)
    monkeypatch.setattr(shim, "die_with", lambda parent_pid: None)
    assert shim.main(["script.py"]) == EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith("odyssey: the launcher that has started this process has set RANK=")
    for name, value in wrong.items():
        assert f"{name}={value}" in said


def test_who_waits_for_a_verdict_does_not_warn_of_it(monkeypatch):
    """For a job of weeks, every few seconds."""
    monkeypatch.setattr(shim.os, "environ", dict(PLACED))
    monkeypatch.setattr(shim.os, "execv", lambda *command: None)
    shim.become()
    assert shim.os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"


def ignored(capsys, script: str, **settings) -> list[str]:
    line.say_what_is_ignored(OdysseyConfig(**settings), script)
    return capsys.readouterr().err.splitlines()


def test_settings_without_odyssey_are_told(capsys, tmp_path):
    """It is easily forgotten, and the job would be lost with the first rank."""
    (script := tmp_path / "pretrain_gpt.py").write_text("from megatron.training import pretrain")
    (own := tmp_path / "own.py").write_text("from odyssey_megatron.mcore.plugin import Session")
    (said,) = ignored(capsys, str(script), respawn=1, run_dir="here")
    assert said.startswith("[odyssey] --odyssey-run-dir, --odyssey-respawn: given without --odyssey")
    assert not ignored(capsys, str(script))
    assert not ignored(capsys, str(script), mode="recover", respawn=1)
    for joins in (str(own), "a.module"):
        assert not ignored(capsys, joins, respawn=1)


def test_a_misspelled_variable_is_told(capsys, monkeypatch):
    for name in ("ODYSSEY_REDUNDENCY", "ODYSSEY_MINE", "ODYSSEY_RESPAWN", "ODYSSEY_TOKEN", "ODYSSEYS"):
        monkeypatch.setenv(name, "1")
    assert ignored(capsys, "script.py") == [
        "[odyssey] the variable ODYSSEY_MINE is unknown and changes nothing.",
        "[odyssey] the variable ODYSSEY_REDUNDENCY is unknown and changes nothing; is ODYSSEY_REDUNDANCY meant?",
    ]


@pytest.mark.parametrize(("mode", "seconds"), [("off", 30), ("observe", 30), ("recover", TERMINATE_S)])
def test_ranks_have_torchrun_s_time_to_end_where_they_run_as_under_torchrun(mode, seconds):
    assert line.by_signal_s(OdysseyConfig(mode=mode)) == seconds


@pytest.mark.parametrize("version", ["2.8.0+cu128", "2.10.1", "1.13"])
def test_an_old_torch_is_refused_before_anything_starts(version):
    with pytest.raises(ConfigError, match=r"torch \S+ is too old: Odyssey needs 2\.11"):
        line.check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0a0+1234567.nv26.10", "3.0.0"])
def test_a_newer_one_is_not(version):
    line.check_torch(version)


def test_what_pip_asks_for_is_what_is_checked():
    said = (CHECKOUT / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, line.LEAST_TORCH))},' in said


def test_arguments_of_torchrun_that_change_nothing_are_told(capsys):
    line.parse(["--max-restarts", "0", "script.py"], "odyssey run")
    assert not capsys.readouterr().err
    given = ("--max-restarts", "2", "--monitor-interval", "5", "--signals-to-handle", "SIGTERM")
    line.parse([*given, "script.py"], "odyssey run")
    told = capsys.readouterr().err.splitlines()
    assert [one.partition(" here:")[0] for one in told] == [
        f"[odyssey] {flag} changes nothing" for flag in given[::2]
    ]
    with pytest.raises(SystemExit):
        line.parse(["--help"], "odyssey run")
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("Changes nothing: ") == len(given) / 2
    assert "Default: 5 if a signal ends the job (torchrun's time without --odyssey and" in told
    assert "--odyssey observe), 2 if it cannot go on." in told
    assert "a range of numbers is refused" in told
