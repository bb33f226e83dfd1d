"""``odyssey top``: frames of a run, as a user's terminal gets them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from odyssey_megatron import cli
from odyssey_megatron.metrics.follow import Follower
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.metrics.live import GivenUp, live
from odyssey_megatron.metrics.standing import DEAD
from odyssey_megatron.metrics.timeline import last_job
from odyssey_megatron.watch.screen import frame

PLAIN = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


@pytest.fixture
def state(runs):
    return live("shot_at", Follower(runs["shot_at"]).events())


def test_one_frame_has_all_there_is(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["top", str(runs["shot_at"]), "--once"]) == 0
    text = capsys.readouterr().out
    for wanted in (
        "odyssey shot_at · ended: trained",
        "5 of 8 ranks live",
        "1 more worker and 0 more nodes can be lost at once",
        "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
        "rejected: worker 4 would need 210 MiB",
        "watch host0: rank(s) ",
    ):
        assert wanted in text
    assert "--exclude" not in text, "the deaths were injected"
    assert re.search(r"^stage 0 E 1–3 .*✕ .*1\.00", text, re.MULTILINE)
    assert "\x1b" not in text, "it is no terminal"


def test_nodes_to_exclude_are_written_for_slurm(state):
    bad = [replace(one, is_to_exclude=True) for one in state.suspects]
    text = frame(replace(state, suspects=tuple(bad)), now_s=0.0, width=120, colours=False)
    assert "--exclude=host0,host1" in text


def test_a_job_that_says_nothing_may_not_run_any_more(state):
    """Whose launcher was killed, that has no last word."""
    cut_off = replace(state, verdict=None)

    def head(later_s):
        return frame(cut_off, now_s=cut_off.heard_s + later_s, width=120, colours=False).splitlines()[0]

    assert head(1.0).startswith("odyssey shot_at · trains · last line 1.0 s ago")
    assert head(90.0).startswith("odyssey shot_at · trains, if it still runs · last line 90.0 s ago")
    cut_off = replace(cut_off, step_s=30.0)
    assert head(90.0).startswith("odyssey shot_at · trains · last line 90.0 s ago")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_map_fits_and_colours_take_no_room(state, width):
    coloured = frame(state, now_s=0.0, width=width, colours=True).splitlines()
    plain = frame(state, now_s=0.0, width=width, colours=False).splitlines()
    rows = [line for line in coloured if line.startswith("stage ")]
    assert len(rows) == 4
    assert all(len(PLAIN.sub("", row)) <= width for row in rows)
    assert [PLAIN.sub("", line).replace(" ", "") for line in coloured] == [
        line.replace(" ", "") for line in plain
    ]


def test_broken_gpus_and_stages_without_anybody_are_said(state):
    places = tuple(replace(one, status=DEAD) if one.stage == 2 else one for one in state.standing.places)
    broken = replace(
        state,
        standing=replace(state.standing, places=places),
        given_up=(GivenUp(rank=5, slot=1, host="host0"),),
    )
    text = frame(broken, now_s=0.0, width=120, colours=False)
    assert re.search("^stage 2 nobody ", text, re.MULTILINE)
    assert "\ngiven up, until odyssey readmit: GPU 1 of host0 (rank 5)\n" in text


def spoiled(value, key=""):
    """``value`` with codes that colour a terminal and ring its bell behind each text, but for the names of events."""
    if isinstance(value, dict):
        return {name: spoiled(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [spoiled(one) for one in value]
    return f"{value}\x1b[31m\x07" if isinstance(value, str) and key != "event" else value


def test_nothing_that_a_journal_says_controls_the_terminal(runs):
    events = last_job(list(read_journal(runs["shot_at"])))
    last, more = events[-1], [
        {"event": "given_up", "target": 3, "slot": 1, "host": "host0"},
        {"event": "left_out", "target": 2, "host": "host1", "why": "NaN"},
        {"event": "slowness", "kind": "slow link", "slow_ranks": [1, 6], "speed": 0.5, "why": "lasts"},
    ]  # fmt: skip
    evil = spoiled([*events, *({**last, **one} for one in more)])
    for state in (live("run\x1b[31m\x07", evil), replace(live("run", evil), verdict=None)):
        text = frame(state, now_s=0.0, width=400, colours=False)
        assert text.count("\\x1b[31m\\x07") > 10, "it is shown"
        assert all(one.isprintable() for one in text.splitlines())


def test_a_job_that_is_only_observed_is_not_said_to_start_or_to_recover(tmp_path, capsys):
    journal = Journal(tmp_path, source="agent0")
    journal.event("job_started", world_size=2, nodes=1, observes=True)
    journal.event("decision", generation=1, dead=[], why="start", policy="initial")
    assert cli.main(["top", str(tmp_path), "--once"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "· observed ·" in first
    assert second.startswith("its steps are in its output (--odyssey observe)")
    journal.event("failure_detected", generation=1, dead=[1], code=[-9], cause="killed", causes=["killed"])
    journal.event("decision", generation=2, dead=[1], why="observed", policy="reroute")
    journal.event("job_finished", verdict="the loss of rank 1 ends the job", exit_code=1)
    assert cli.main(["top", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stalls"] == []


def test_as_json(runs, capsys):
    assert cli.main(["top", str(runs["shot_at"]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["standing"]["generation"] == 6
    assert found["goodput"]["lost"][0]["bucket"] == "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"


def test_in_a_terminal_it_follows_until_the_job_has_ended(runs, tmp_path):
    files = {path.name: path.read_bytes() for path in (runs["shot_at"] / "journal").iterdir()}
    (tmp_path / "run" / "journal").mkdir(parents=True)
    for name, raw in files.items():
        lines = [one for one in raw.splitlines(keepends=True) if json.loads(one)["wall_s"] < 1.7e9 + 1008]
        (tmp_path / "run" / "journal" / name).write_bytes(b"".join(lines))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "odyssey_megatron", "top", str(tmp_path / "run"), "--every-s", "0.1"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = read_until(ours, "trains")
        for name, raw in files.items():
            (tmp_path / "run" / "journal" / name).write_bytes(raw)
        shown += read_until(ours, "ended: trained")
        assert process.wait(20) == 0
    assert "\x1b[48;5;" in shown, "colours"
    os.close(ours)


def read_until(terminal: int, text: str) -> str:
    found, ends_s = "", time.monotonic() + 30
    while text not in found:
        assert time.monotonic() < ends_s, found[-2000:]
        if select.select([terminal], [], [], 0.2)[0]:
            found += os.read(terminal, 1 << 16).decode(errors="replace")
    return found


def test_bad_input(tmp_path, capsys, runs):
    for argv, reason in (
        (["top", str(tmp_path)], "has no journal folder"),
        (["top", str(runs["shot_at"]), "--every-s", "0"], "from 0.1 to 3,600"),
        (["top", str(runs["shot_at"]), "--page-port", "70000"], "from 0 to 65,535"),
        (
            ["top", str(runs["shot_at"]), "--page-port", "0", "--bind", "203.0.113.7"],
            "cannot listen at 203.0.113.7",
        ),
    ):
        assert cli.main(argv) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1
