"""Hosts' clocks differ, drift and jump: the report of a job on two is that of the same job on one."""

from __future__ import annotations

import json
import shutil

import pytest

from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.metrics.run import read_run, summary, text_summary
from odyssey_megatron.metrics.timeline import last_job

from .synthetic_run import JOB

DRIFT = 1e-5
"""A second in a day."""


def there(t_s: float) -> float:
    """What the second host's monotonic clock shows when the first one's shows ``t_s``."""
    return (t_s - 1000.0) * (1 + DRIFT) + 5e6


def moved(event: dict, wall_of_job_s: float) -> dict:
    """The event as a process on the second host would have written it. Its wall clock jumps in mid-job."""
    readings = {
        name: there(event[name]) for name in ("agreed_s", "in_groups_s", "resumed_s") if name in event
    }
    if "instructions" in event:
        readings["instructions"] = [[text, there(a), there(b)] for text, a, b in event["instructions"]]
    jump_s = 3600.0 if event["wall_s"] < wall_of_job_s + 4.0 else -7200.0
    return event | readings | {
        "t_s": there(event["t_s"]), "wall_s": event["wall_s"] + jump_s, "clock": "the second host's",
    }  # fmt: skip


@pytest.mark.parametrize("second_host", [(4, 5, 6, 7), (0, 1, 2)], ids=["last ranks", "who speaks"])
def test_two_hosts_whose_clocks_have_nothing_in_common(runs, tmp_path, second_host):
    shutil.copytree(runs["shot_at"], tmp_path / "run")
    began_s = next(read_journal(runs["shot_at"]))["wall_s"]
    for rank in second_host:
        path = tmp_path / "run" / "journal" / f"rank{rank}.jsonl"
        events = [moved(json.loads(line), began_s) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
    one, two = read_run(runs["shot_at"]), read_run(tmp_path / "run")
    assert "clocks of 2 hosts" in text_summary(two, None)
    assert "clocks of" not in text_summary(one, None)
    for ours, theirs in zip(one.recoveries, two.recoveries, strict=True):
        for name in ("failed_wall_s", "detect_s", "in_groups_s", "stall_s"):
            assert getattr(theirs, name) == pytest.approx(getattr(ours, name), abs=1e-3), name
    assert [row.interval_s for row in two.steps[1:]] == pytest.approx(
        [row.interval_s for row in one.steps[1:]], abs=1e-3
    )
    assert [step.end_s for step in two.traced] == pytest.approx([step.end_s for step in one.traced], abs=1e-3)
    keys = ("steps", "verdict", "final_loss", "samples", "switches")
    assert {key: summary(two, None)[key] for key in keys} == {key: summary(one, None)[key] for key in keys}


def write(tmp_path, source: str, clock: str, *events: tuple[str, float, dict]) -> None:
    journal = Journal(tmp_path, source=source, job=JOB)
    journal._clock = clock
    for name, _, values in events:
        journal.event(name, **values)
    journal.close()
    path = tmp_path / "journal" / f"{source}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, (_, t_s, _) in zip(rows, events, strict=True):
        row["t_s"], row["wall_s"] = t_s, 1.7e9
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def started(generation: int, agreed_s: float) -> tuple[str, float, dict]:
    return "generation_started", agreed_s + 1.0, {"generation": generation, "agreed_s": agreed_s}


def test_a_host_that_the_first_one_never_met_is_joined_through_another(tmp_path):
    write(tmp_path, "agent0", "a", ("job_started", 10.0, {}))
    write(tmp_path, "rank0", "a", started(1, 20.0))
    write(tmp_path, "rank1", "b", started(1, 520.0), started(2, 540.0))
    write(tmp_path, "rank2", "c", started(2, 9040.0), ("fenced", 9050.0, {}))
    write(tmp_path, "rank3", "d", ("fenced", 1.0, {}))
    events = last_job(list(read_journal(tmp_path)))
    epoch_s = 1.7e9 - 10.0
    assert [(event["source"], event["at_s"] - epoch_s) for event in events[:-1]] == [
        ("agent0", 10.0), ("rank0", 21.0), ("rank1", 21.0), ("rank1", 41.0), ("rank2", 41.0), ("rank2", 50.0),
    ]  # fmt: skip
    assert events[-1]["source"] == "rank3", "its clock is nobody's"
    assert events[-1]["at_s"] != events[-1]["at_s"]


def test_a_host_without_ranks_is_joined_by_what_it_hears_of_their_agreements(tmp_path):
    agreed = "generation_agreed", 100.0, {"generation": 1, "agreed_s": 99.5}
    write(tmp_path, "host", "its", ("job_started", 98.0, {"world_size": 1, "nodes": 1}), agreed)
    begun = "generation_started", 700.2, {"generation": 1, "agreed_s": 700.0, "members": [0]}
    write(tmp_path, "rank0", "theirs", begun, ("step_committed", 701.0, {"generation": 1}))
    events = last_job(list(read_journal(tmp_path)))
    at_s = {event["event"]: event["at_s"] for event in events}
    assert at_s["step_committed"] - at_s["generation_agreed"] == pytest.approx(701.0 - 700.5)
