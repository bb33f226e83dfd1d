from __future__ import annotations

import json
import os
import signal

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.metrics.records import COMMON_FIELDS, EVENTS, SCHEMA_VERSION, JournalLine


def test_events_come_back_in_order_with_the_common_fields(tmp_path):
    first, second = Journal(tmp_path, source="agent0"), Journal(tmp_path, source="rank3", rank=3)
    first.event("job_started", world_size=4, nodes=[0, 0, 0, 0])
    second.event("step_committed", generation=1, step=0, loss={"lm loss": 2.5}, step_s=0.1)
    first.event("job_finished", verdict="trained", exit_code=0)
    events = list(read_journal(tmp_path))
    assert [event["event"] for event in events] == ["job_started", "step_committed", "job_finished"]
    assert all(set(COMMON_FIELDS) <= set(event) for event in events)
    assert events[1] | {"rank": 3, "source": "rank3", "generation": 1, "loss": {"lm loss": 2.5}} == events[1]


def test_unknown_events_and_fields_are_refused(tmp_path):
    journal = Journal(tmp_path, source="rank0", rank=0)
    with pytest.raises(KeyError):
        journal.event("tea_break")
    with pytest.raises(KeyError, match="los"):
        journal.event("step_committed", los=1.0)


def test_what_each_field_holds_is_written_down():
    of_events = {field for fields in EVENTS.values() for field in fields}
    assert set(JournalLine.__annotations__) == of_events | {*COMMON_FIELDS}


def test_no_event_uses_the_name_of_a_common_field():
    assert not {field for fields in EVENTS.values() for field in fields} & set(COMMON_FIELDS)


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    writer = os.fork()
    if writer == 0:
        journal = Journal(tmp_path, source="rank0", rank=0)
        while True:
            journal.event("weights", digest={"layer": list(range(200))})
    try:
        path = tmp_path / "journal" / "rank0.jsonl"
        while not path.exists() or path.stat().st_size < 100_000:
            os.sched_yield()
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    lines = path.read_text().splitlines()
    assert len(list(read_journal(tmp_path))) == len(lines) > 10


def test_a_torn_last_line_is_left_out(tmp_path):
    Journal(tmp_path, source="rank0", rank=0).event("fenced", why="late")
    with (tmp_path / "journal" / "rank0.jsonl").open("a") as file:
        file.write('{"event": "fen')
    assert [event["why"] for event in read_journal(tmp_path)] == ["late"]


def test_of_some_events_only_their_lines_are_parsed_and_only_files_that_may_have_them_are_read(tmp_path):
    agent, host = (Journal(tmp_path, source=one) for one in ("agent0", "host"))
    agent.event("rank_started", target=3, pid=1, host="rank_started")
    agent.event("generation_agreed", generation=1)
    host.event("job_finished", verdict="done", exit_code=0)
    with (tmp_path / "journal" / "agent0.jsonl").open("a") as file:
        file.write('{"event":"no event"}\n')
    (tmp_path / "journal" / "rank3.jsonl").mkdir()
    said = []
    found = read_journal(tmp_path, said.append, only=("rank_started", "job_finished"))
    assert [event["event"] for event in found] == ["rank_started", "job_finished"]
    assert not said
    with pytest.raises(ConfigError, match="rank3"):
        list(read_journal(tmp_path, only=("rank_started", "step_committed")))


def test_lines_share_the_texts_that_they_have_in_common(tmp_path):
    """They would be half of what a long job's report keeps."""
    journal = Journal(tmp_path, source="rank0", rank=0, job="ab12cd34")
    for step in range(2):
        journal.event("step_committed", step=step, loss={}, tokens=64)
    first, second = read_journal(tmp_path)
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert all(first[name] is second[name] for name in ("event", "job", "source", "clock"))


def test_a_newer_schema_is_refused(tmp_path):
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "rank0.jsonl").write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1, "wall_s": 0}))
    with pytest.raises(ConfigError, match=f"schema_version {SCHEMA_VERSION + 1}"):
        list(read_journal(tmp_path))


def test_the_echo_is_one_line_for_people(tmp_path, capsys):
    journal = Journal(tmp_path, source="agent0")
    journal.event("failure_detected", generation=2, dead=[5], code=-9, cause="killed", echo=True)
    assert capsys.readouterr().err == "[odyssey gen=2] event=failure_detected dead=5 code=-9 cause=killed\n"


def test_a_recovery_is_echoed_with_its_stall_and_no_clock_readings(tmp_path, capsys):
    journal = Journal(tmp_path, source="rank0", rank=0)
    durations = {"decide_s": 0.01, "abort_s": 0.02, "groups_s": 0.03, "agree_s": 0.04, "transfer_s": 0.1}
    readings = {"in_groups_s": 1309.4, "resumed_s": 1309.5}
    journal.event("recovered", generation=2, step=3, dead=[5], **durations, **readings, echo=True)
    shown = capsys.readouterr().err
    assert shown.startswith("[odyssey gen=2 step 3 (iteration 4) rank=0] event=recovered stall_s=0.2 dead=5 ")
    assert "1309" not in shown
    (event,) = read_journal(tmp_path)
    assert readings.items() <= event.items()
    assert "stall_s" not in event
