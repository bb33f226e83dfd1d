"""Of a long job a few numbers are kept of each step; what is shown is the same as of its whole journal."""

from __future__ import annotations

import json
import math
import tracemalloc

import pytest

from odyssey_megatron.metrics import follow
from odyssey_megatron.metrics.follow import Follower
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.live import live
from odyssey_megatron.metrics.records import CLOCK_READINGS
from odyssey_megatron.metrics.recoveries import recoveries
from odyssey_megatron.metrics.timeline import last_job

MEMBERS = {1: [0, 1, 2, 10], 2: [0, 1, 10], 3: [0, 1, 2, 10], 4: [0, 10], 5: [0, 1, 2, 10]}
"""The ranks of each generation. Files are read in another order than that of their numbers."""
SPEAKER = {1: 10, 2: 1, 3: 2, 4: 10, 5: 0}
"""Who reports steps. Ranks 2 and 10 are on another host."""
EACH = 500
"""Steps of a generation. Its first one was the last one's before, and is done again."""


class LongRun:
    """Lines of a job with two hosts, whose clocks drift apart."""

    def __init__(self, job="ab12cd34"):
        self.lines, self.now_s, self.job = [], 100.0, job

    def line(self, source, event, generation=-1, step=-1, **values):
        there = source in ("rank2", "rank10")
        t_s = self.now_s * (1 + 1e-5) + 7000 if there else self.now_s
        head = {"schema_version": 3, "event": event, "t_s": t_s, "wall_s": 1.7e9 + self.now_s}
        head |= {"clock": "ba"[not there], "job": self.job, "source": source, "generation": generation}
        rank = int(source[4:]) if source.startswith("rank") else -1
        values = {name: t_s - value if name in CLOCK_READINGS else value for name, value in values.items()}
        self.lines.append((f"{source}.jsonl", json.dumps({**head, "step": step, "rank": rank, **values})))

    def commit(self, source, generation, step, step_s=1.0):
        measured = {"loss": {"lm loss": 2 + 1 / (step + 1)}, "grad_norm": 1.0, "step_s": step_s}
        self.line(source, "step_committed", generation, step, **measured, tokens=64 + step % 3)

    def begin(self, generation, step):
        lost = sorted({*MEMBERS[1]} - {*MEMBERS[generation]})
        if generation == 3:  # ranks went on training in the first half of the coordinator's pause
            self.now_s += 10.0
            self.line("agent0", "stood_still", lasted_s=20.0)
        if generation > 1:
            self.line("agent0", "failure_detected", generation - 1, dead=lost or [1], cause="killed")
        values = {"dead": lost, "policy": "replan", "plan_hash": "0"}
        self.line("agent0", "decision", generation, **values, decide_s=0.1)
        self.now_s += 3.0
        for rank in MEMBERS[generation]:
            self.line("agent0", "rank_started", target=rank, pid=rank, host=f"host{rank}")
            members = {"members": MEMBERS[generation], "agreed_s": 0.5}
            self.line(f"rank{rank}", "generation_started", generation, step, **members)
            if generation > 1:
                self.line(
                    f"rank{rank}", "recovered", generation, step, **values, outcome="redo", resumed_s=0.1
                )

    def write(self):
        self.line("agent0", "job_started", world_size=4, nodes=2)
        for generation in MEMBERS:
            first = max(0, (generation - 1) * EACH - 1)
            self.begin(generation, first)
            for step in range(first, generation * EACH):
                self.now_s += 1.0 + 0.1 * math.sin(step) + (step % 97 == 0)
                self.commit(f"rank{SPEAKER[generation]}", generation, step)
                if generation > 1 and step == first:
                    self.line(f"rank{SPEAKER[generation]}", "redone", generation, step, redo_s=1.0)
                if step % 100 == 0:
                    self.line("rank0", "saved", generation, step, save_s=0.3)
                    self.commit("rank0", generation, step, step_s=-1.0)
                if step % 300 in (150, 200):
                    told = {"kind": "slow worker", "slow_ranks": [2 - step // 1000], "why": "it takes longer"}
                    self.line("agent0", "slowness", **told, speed=0.5 if step % 300 == 150 else 1.0)
        self.line("agent0", "job_finished", verdict="done", exit_code=0)
        return self.lines


def append(folder, lines):
    (folder / "journal").mkdir(exist_ok=True)
    for name, text in lines:
        with (folder / "journal" / name).open("a") as file:
            file.write(text + "\n")


def test_a_long_job_that_is_followed_shows_what_its_whole_journal_does(tmp_path):
    lines, parts = LongRun().write(), 9
    append(tmp_path, lines[:1])
    follower, shown = Follower(tmp_path), []
    for part in range(parts):
        append(tmp_path, lines[1:][len(lines) * part // parts : len(lines) * (part + 1) // parts])
        whole = live("long", last_job(list(read_journal(tmp_path))))
        for one in (follower, Follower(tmp_path)):
            events, older = one.look()
            assert live("long", events, older) == whole
        shown.append((len(older), len(events)))
    assert whole.committed == EACH * len(MEMBERS)
    (unseen,) = (row.stall_s for row in recoveries(events, older) if row.generation == 3)
    assert unseen == pytest.approx(12.9, abs=0.1), "from the last step, whose lines are not kept"
    assert {one.bucket.rpartition(".")[2] for one in whole.goodput.lost} >= {
        "TRAINING_PREP", "WASTED_PROGRESS_FROM_DISRUPTION", "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME", "FEWER_RANKS",
        "SLOW_RANKS", "OTHER",
    }  # fmt: skip
    assert shown[-1][0] > EACH * len(MEMBERS) / 2, "of most steps the lines are not kept"
    assert max(count for _, count in shown) < 2 * follow._WHOLE_STEPS + 200


def test_the_steps_of_a_job_before_are_not_those_of_the_next_one(tmp_path):
    append(tmp_path, LongRun().write())
    follower = Follower(tmp_path)
    assert len(follower.look()[1])
    second = LongRun("0f0f0f0f")
    second.now_s = 9000.0
    second.line("agent0", "job_started", world_size=4, nodes=2)
    append(tmp_path, second.lines)
    events, older = follower.look()
    assert (len(events), live("next", events, older).committed) == (1, 0)


def test_steps_that_are_not_whole_any_more_take_few_bytes(tmp_path):
    run = LongRun()
    run.line("agent0", "job_started", world_size=4, nodes=2)
    run.begin(1, 0)
    append(tmp_path, run.lines)
    follower, before = Follower(tmp_path), len(run.lines)
    for step in range(6 * follow._WHOLE_STEPS):
        run.now_s += 1
        run.commit("rank0", 1, step)
    cut, taken_bytes = before + 2 * follow._WHOLE_STEPS, []
    tracemalloc.start()
    for lines in (run.lines[before:cut], run.lines[cut:]):
        append(tmp_path, lines)
        follower.look()
        taken_bytes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert taken_bytes[1] - taken_bytes[0] < 100 * 4 * follow._WHOLE_STEPS


@pytest.mark.parametrize("event", [{"tokens": 2**64}, {"tokens": None}, {"step": 2**60}])
def test_a_number_that_is_none_of_a_step_is_left_out(tmp_path, event):
    run = LongRun()
    run.commit("rank0", 1, 0)
    ((name, text),) = run.lines
    append(tmp_path, [(name, json.dumps(json.loads(text) | event))])
    assert Follower(tmp_path).events() == []
