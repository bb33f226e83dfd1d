"""What comes from outside is checked where it enters: one paragraph, exit code 2, and no traceback."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from odyssey_megatron import cli
from odyssey_megatron.codec import to_jsonable
from odyssey_megatron.inputs import COUNT, Between, read_text
from tests.plan.samples import preset_profile

PROFILE = preset_profile("llama2-7b", "h100")


def refused(capsys, *argv) -> str:
    """What is said on stderr; it is one paragraph."""
    assert cli.main([str(one) for one in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"odyssey {argv[0]}: ")
    assert error.count("\n") == 1
    assert len(error) < 800
    return error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "plan --micro-batch-size -3",
            "--micro-batch-size: a whole number from 1 to 262,144 is expected, found -3",
        ),
        ("plan --cluster 99999999999x8", "at most 16,384 GPUs in total"),
        ("plan --cluster 4096x8", "at most 16,384 GPUs in total"),
        ("plan --cluster 0x8", "found 0"),
        ("plan --num-microbatches 100000", "are 3,200,000 visits, and at most 262,144 are planned"),
        ("plan --slow 0=1e-300", "a number from 0.001 to 1 is expected, found 1e-300"),
        ("plan --slow 0=nan", "found nan"),
        ("plan --slow 0", "found ''"),
        ("plan --kill=-1:3", "-1:3: no such GPU"),
        ("plan --kill=1:-3", "1:-3: no such GPU"),
        ("plan --mtbf-s nan", "found nan"),
        ("plan --horizon-s inf", "found inf"),
        ("plan --width -1", "found -1"),
        ("plan --profile /dev/zero", "it is no file, but a folder, a pipe or a device"),
        ("plan --what", "--what: neither of this command's flags nor of Megatron-LM's"),
        (
            "simulate --interval-s 0",
            "--interval-s: a number from 0.001 to 1,000,000,000 is expected, found 0",
        ),
        ("simulate --mtbf-s 1e-6", "found 1e-06"),
        ("simulate --mtbf-s 1", "at most 5,000 with their repairs are played"),
        ("simulate --mtbf-s nan", "found nan"),
        ("simulate --mtbf-s 9 --trace x", "--trace and --mtbf-s say what is played in different ways"),
        ("simulate --mtbf-s 9 --losses 2", "--losses is for --interval-s, and --mtbf-s is given"),
        ("simulate --duration-s inf", "found inf"),
        ("simulate --repair-s -1", "found -1"),
        ("simulate --group-build-s -1", "found -1"),
        ("simulate --micro-batch-size 1000", "the healthy job does not fit"),
        ("simulate --cluster 1x1 --pipeline-model-parallel-size 1", "one worker cannot lose another"),
        ("simulate --trace /dev/null", "it is no file"),
        ("inject /nowhere --rank -1", "found -1"),
        ("inject /nowhere --rank 0", "has no record of a rank 0"),
        ("report /nowhere", "has no journal folder"),
        ("report /nowhere --colour", "unrecognized arguments: --colour"),
        ("patch install /nowhere", "is no Megatron-LM checkout"),
        ("patch paint /nowhere", "invalid choice: 'paint'"),
        ("doctor /nowhere", "is no Megatron-LM checkout"),
        ("doctor --odyssey-hang-s nan", "found nan"),
        (
            "run --nproc-per-node abc script.py",
            "--nproc-per-node/--nproc_per_node: a whole number from 1 to 1,024",
        ),
        ("run --nproc-per-node 0 script.py", "found 0"),
        ("run --node-rank=-1 script.py", "found -1"),
        ("run --master-port 99999 script.py", "found 99999"),
        ("run --monitor-interval nan script.py", "found nan"),
        ("run -r abc script.py", "found 'abc'"),
        ("run --colour script.py", "unrecognized arguments: --colour"),
        ("run", "the following arguments are required"),
        ("run missing.py", "missing.py: there is no such script"),
        ("run --nnodes 0 script.py", "--nnodes 0: a whole number from 1 to 100,000 is expected, found 0"),
        ("run --nnodes two script.py", "found 'two'"),
        (
            "run --nnodes 2 --node-rank 2 tests/test_inputs.py",
            "--node-rank 2: --nnodes 2 has the node ranks 0 to 1",
        ),
        ("run script.py --odyssey-hang-s inf", "found inf"),
    ],
)
def test_what_a_command_cannot_do(capsys, argv, message, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *argv.split())


def layers(**changes):
    return replace(PROFILE.costs, layers=tuple(replace(one, **changes) for one in PROFILE.costs.layers))


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            layers(forward_s=-1.0),
            "costs: layers: forward_s: a number from 0 to 1,000,000 is expected, found -1.0",
        ),
        (
            layers(weight_grad_s=math.nan),
            "weight_grad_s: a number from 0 to 1,000,000 is expected, found nan",
        ),
        (layers(input_grad_s=math.inf), "found inf"),
        (layers(forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0), "its layers take 0 s for a microbatch"),
        (layers(state_bytes=-5), "state_bytes: a whole number from 0 to"),
        (
            replace(PROFILE.costs, link_bytes_per_s=0.0),
            "link_bytes_per_s: a number of 1 or more is expected, found 0.0",
        ),
        (replace(PROFILE.costs, layers=()), "it has 0 layer(s)"),
        (replace(PROFILE.costs, layers=PROFILE.costs.layers * 100), "it has 3400 layer(s)"),
    ],
)
def test_a_profile_that_cannot_be(tmp_path, capsys, costs, message):
    path = tmp_path / "profile.json"
    replace(PROFILE, costs=costs).save(path)
    assert message in refused(capsys, "plan", "--profile", path)


def test_a_profile_as_an_editor_of_another_system_saves_it(tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(to_jsonable(PROFILE), indent=1).replace("\n", "\r\n").encode()
    )
    assert cli.main(["plan", "--profile", str(path), "--width", "0"]) == 0
    for text in (
        b"",
        b"\x00" * 100,
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000,
        b"[1" + b"0" * 10_000 + b"]",
        b"{}",
    ):
        path.write_bytes(text)
        assert "Give a profile.json that a run has written" in refused(capsys, "plan", "--profile", path)


def test_only_files_are_read_and_not_without_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(2**40)
    for name, message in (("pipe", "no file"), ("loop", "cannot be read"), ("long", "1,099,511,627,776 bytes"),
                          ("missing", "No such file"), (".", "cannot be read|no file")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            read_text(tmp_path / name)


def test_a_range_says_what_it_expects():
    assert str(COUNT) == "a whole number of 0 or more"
    assert Between(0, 1).read("0.5") == 0.5
    for text in ("nan", "inf", "-inf", "1e999", "", "x", "0x1", "9" * 5000):
        with pytest.raises(ValueError, match="a number from 0 to 1 is expected, found"):
            Between(0, 1).read(text)
    with pytest.raises(ValueError, match="a whole number of 0 or more is expected"):
        COUNT.read("9" * 5000)


@pytest.mark.parametrize("command", ["--help", "plan --width 0", "plan --json"])
def test_whoever_reads_may_stop(command):
    """A terminal that closes, "| head", or no stdout at all."""
    run = [sys.executable, "-m", "odyssey_megatron", *command.split()]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(run, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert not [
        one for one in done.stderr.splitlines() if not one.startswith(b"odyssey plan: ")
    ]  # how far it is
    assert done.returncode == 141
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *run], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert b"Traceback" not in done.stderr


LINE = (
    '{"schema_version":1,"event":"step_committed","t_s":1.0,"wall_s":2.0,"source":"rank0","generation":1,"step":0,'
    '"rank":0,"loss":{},"step_s":-1,"grad_norm":NaN}\n'
)


@pytest.fixture
def journal(tmp_path):
    """Its text is written to the journal of a rank, or of another process."""
    folder = tmp_path / "run" / "journal"
    folder.mkdir(parents=True)

    def write(text: str | bytes, name: str = "rank0"):
        (folder / f"{name}.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
        return tmp_path / "run"

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7\n", "line 1: it is no event of a journal (expected JournalLine, found 7)"),
        ("[" * 100_000, "nested too deeply"),
        ('{"x":' * 100_000, "nested too deeply"),
        ("9" * 5000, "line 1"),
        (LINE.replace('"step":0', '"step":"0"'), "step: expected int, found '0'"),
        (LINE.replace('"step":0', f'"step":{10**30}'), "step: a whole number from -1 to"),
        (LINE.replace('"wall_s":2.0', '"wall_s":NaN'), "wall_s: a number from 0 to"),
        (
            LINE.replace('"wall_s":2.0', f'"wall_s":1{"0" * 400}'),
            "wall_s: a whole number is longer than a float can be",
        ),
        (LINE.replace('"loss":{}', '"loss":{"lm loss":"<b>"}'), "loss: expected float, found '<b>'"),
        (
            LINE.replace('"schema_version":1', '"schema_version":"x"'),
            "schema_version: expected int, found 'x'",
        ),
        (
            LINE.replace('"schema_version":1', '"schema_version":99'),
            "report: {run}/journal/rank0.jsonl, line 1: it has schema_version 99",
        ),
        ("", "holds 0 event(s) and no committed step"),
        (b"\x00" * 1000, "holds 0 event(s)"),
        (b"\x80\xff{}", "holds 0 event(s)"),
    ],
)
def test_what_no_journal_holds(journal, capsys, text, message):
    run = journal(text)
    assert message.replace("{run}", str(run)) in refused(capsys, "report", run)


def test_what_a_journal_may_hold_when_its_writer_was_killed(journal, capsys):
    """A torn line anywhere, zeros from a power loss, line ends of another system; no loss that has a name."""
    text = (
        LINE[:40]
        + "\n"
        + LINE
        + "\n\x00\x00\x00\n"
        + LINE.replace('"step":0', '"step":1').replace("\n", "\r\n")
        + LINE[:70]
    )
    assert cli.main(["report", str(journal(text)), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["steps"], got["final_loss"]) == (2, None)


def test_what_else_may_lie_in_a_journal_s_folder(journal, capsys):
    folder = journal(LINE) / "journal"
    for make, message in (
        (lambda path: path.mkdir(), "it cannot be read (Is a directory)"),
        (os.mkfifo, "it is no file"),
        (lambda path: path.symlink_to(path.name), "it cannot be read (Too many levels of symbolic links)"),
        (lambda path: path.symlink_to("/nowhere"), "it cannot be read (No such file or directory)"),
        (lambda path: path.symlink_to("/dev/zero"), "it is no file"),
    ):
        for name, command in (("rank1", ["report"]), ("agent1", ["inject", "--rank", 0])):
            path = folder / f"{name}.jsonl"
            make(path)
            assert message in refused(capsys, command[0], folder.parent, *command[1:])
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_journal_s_folder_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "journal").symlink_to("journal")
    told = refused(capsys, "inject", tmp_path, "--rank", 0)
    assert "journal cannot be read (Too many levels of symbolic links)" in told


@pytest.mark.parametrize("more", [[], ["--slow", "2"]])
def test_a_rank_of_another_user(journal, capsys, monkeypatch, more):
    started = f'"event":"rank_started","target":0,"pid":{os.getpid()}'
    now = LINE.replace('"event":"step_committed"', started).replace('"t_s":1.0', f'"t_s":{time.monotonic()}')

    def refuse(*to):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    told = refused(capsys, "inject", journal(now, "agent0"), "--rank", 0, *more)
    assert "gets no signal (Operation not permitted). Do it as the user who has started the job" in told
    assert "no record of a rank 0" in refused(
        capsys, "inject", journal(now.replace("pid", "x"), "agent0"), "--rank", 0
    )


def test_what_a_journal_says_leaves_the_terminal_as_it_is(journal, capsys):
    finished = LINE.replace("step_committed", "job_finished").replace(
        '"loss"', '"verdict":"\\u001b]0;x\\u0007\\ud800","loss"'
    )
    assert cli.main(["report", str(journal(LINE + finished)), "--out", str(journal(LINE) / "out")]) == 0
    assert (
        cli.main(["report", str(journal(LINE + finished)), "--out", str(journal(LINE + finished) / "out")])
        == 0
    )
    out = capsys.readouterr().out
    assert "\\x1b]0;x\\x07\\ud800" in out
    assert "\x1b" not in out


def test_a_checkout_that_is_damaged(tmp_path, capsys):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for text in (b"\x00", b"\xff\xfe", b"def (", b"(" * 10_000):
        (core / "package_info.py").write_bytes(text)
        for command in ("patch status", "patch install", "doctor"):
            assert "is no Python source" in refused(capsys, *command.split(), tmp_path)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    (tmp_path / "pyproject.toml").write_bytes(b"\xcf")
    assert cli.main(["doctor", str(tmp_path)]) == 1  # it is empty otherwise


@pytest.mark.parametrize("value", ["²", "9" * 5000])
def test_variables_that_hold_no_number(monkeypatch, capsys, value):
    for name in ("SLURM_JOB_NUM_NODES", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "NCCL_IB_TIMEOUT"):
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) in (0, 1)
    assert f"NCCL_IB_TIMEOUT: {value}" in capsys.readouterr().out
