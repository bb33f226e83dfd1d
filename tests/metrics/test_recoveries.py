from __future__ import annotations

import pytest

from odyssey_megatron.metrics.commits import NO_COMMITS
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.recoveries import recoveries
from odyssey_megatron.metrics.run import read_run
from odyssey_megatron.metrics.timeline import last_job

from .synthetic_run import FIRST, SECOND, STEP_S, SWITCH


@pytest.fixture(scope="module")
def rows(runs):
    return read_run(runs["shot_at"]).recoveries


def test_one_row_per_generation_that_a_failure_began(rows):
    assert [(row.generation, row.step, row.dead, row.policy, row.outcome) for row in rows] == [
        (2, FIRST, (5,), "reroute", "redo"),
        (5, SECOND, (0,), "reroute", "superseded"),
        (6, SECOND, (3,), "replan", "redo"),
    ]
    assert [row.plan_hash for row in rows] == [f"{g:012x}" for g in (2, 5, 6)]
    assert {row.cause for row in rows} == {"killed"}


def test_durations_are_the_slowest_survivor_s(rows):
    row = rows[0]
    seconds = (row.detect_s, row.decide_s, row.abort_s, row.agree_s, row.groups_s, row.transfer_s, row.redo_s)
    # Rank 7, the last survivor, aborted 7 ms later than rank 0 and took 7 ms longer for its groups.
    assert seconds == pytest.approx((0.012, 0.004, 0.009, 0.003, 0.027, 0.0, STEP_S), abs=1e-6)


def test_the_stall_is_from_the_kill_to_the_last_survivor_s_next_instruction(rows):
    assert rows[0].in_groups_s == pytest.approx(0.012 + 0.004 + 0.030 + 0.007, abs=1e-6)
    assert rows[0].stall_s == pytest.approx(0.012 + 0.004 + 0.090 + 0.007, abs=1e-6)


def test_a_superseded_recovery_counts_into_the_stall_of_the_next(rows):
    assert rows[1].stall_s is None
    before_s = 0.010 + 0.004 + 0.030
    assert rows[2].stall_s == pytest.approx(before_s + 0.020 + 0.004 + 0.090 + 0.007, abs=1e-6)
    assert rows[2].transfer_s == pytest.approx(0.040)


def test_a_recovery_that_goes_on_is_not_superseded(runs):
    """Nor is one that was going on when the job ended. Only a later failure supersedes it."""
    events = last_job(list(read_journal(runs["shot_at"])))
    decided = next(n for n, one in enumerate(events) if one["event"] == "decision" and one["generation"] == 2)
    (row,) = recoveries(events[: decided + 1])
    assert (row.generation, row.outcome, row.stall_s) == (2, "unfinished", None)


def test_without_failures_there_are_none(runs):
    run = read_run(runs["undisturbed"])
    assert (run.recoveries, run.switches) == ((), ())


def test_what_was_offered_and_taken_is_a_switch_and_no_recovery(runs):
    (switch,) = read_run(runs["shot_at"]).switches
    assert (switch.generation, switch.step, switch.policy, switch.joined) == (3, SWITCH, "fill", ())
    assert switch.why == "the layout is better after all"
    # The slowest is rank 7.
    assert switch.stall_s == pytest.approx(0.001 + 0.002 + 0.003 + 0.007)


def test_decisions_keep_every_candidate_and_its_reason(runs):
    initial, first, *_ = read_run(runs["shot_at"]).decisions
    assert (initial.policy, initial.candidates) == ("initial", ())
    assert first.dead == (5,)
    assert [row["name"] for row in first.candidates if row["chosen"]] == ["reroute"]
    assert any("rejected" in row["reason"] for row in first.candidates)


def journal_of_one_rank(*deaths):
    """Rank 1 dies, is replaced, and dies again: (cause, seconds from the injection to the notice, or None) each."""
    events, at_s = [], 100.0

    def event(name, generation, **values):
        events.append(
            {
                "event": name,
                "t_s": at_s,
                "at_s": at_s + 1.7e9,
                "generation": generation,
                "step": -1,
                **values,
            }
        )

    generation = 1
    event("decision", generation, dead=[])
    for cause, detect_s in deaths:
        at_s += 10.0
        if detect_s is not None:
            event("injected", generation, rank=1)
            at_s += detect_s
        event("failure_detected", generation, dead=[1], cause=cause)
        detected_s, generation = at_s, generation + 1
        at_s += 0.01
        event("decision", generation, dead=[1])
        at_s += 0.1
        about = {"dead": [1], "detected_s": detected_s, "outcome": "resume", "resumed_s": at_s - 0.03}
        event("recovered", generation, rank=0, **about)
        generation += 1
        event("decision", generation, dead=[], planned=True)
        event("switched", generation, rank=0)
    return events


def test_a_rank_that_dies_twice_has_two_recoveries_with_their_own_times_and_causes():
    rows = recoveries(journal_of_one_rank(("killed", 0.012), ("exit", None), ("hang", 2.0)))
    assert [(row.generation, row.cause) for row in rows] == [(2, "killed"), (4, "exit"), (6, "hang")]
    assert [row.stall_s for row in rows] == pytest.approx([0.092, 0.08, 2.08], abs=1e-6)
    assert [row.detect_s for row in rows] == [
        pytest.approx(0.012, abs=1e-6),
        None,
        pytest.approx(2.0, abs=1e-6),
    ]


@pytest.mark.parametrize(
    ("cause", "detect_s", "lasted_s", "ended_ago_s", "committed_ago_s", "stall_s"),
    [
        ("killed", None, 15.0, 0.01, 12.0, 12.08),  # ranks went on training at first
        ("killed", None, 15.0, -0.05, 20.0, 15.03),  # the notice came before the pause was taken down
        ("killed", None, 15.0, 3.0, 2.0, 0.08),  # the pause was over
        ("killed", 5.0, 15.0, 0.01, 12.0, 5.08),  # it is known when it was
    ],
)
def test_a_stall_began_before_the_pause_in_which_nobody_noticed_the_failure(
    cause, detect_s, lasted_s, ended_ago_s, committed_ago_s, stall_s
):
    events = journal_of_one_rank((cause, detect_s))
    (notice,) = (event for event in events if event["event"] == "failure_detected")
    for name, ago_s, values in (
        ("stood_still", ended_ago_s, {"lasted_s": lasted_s}),
        ("step_committed", committed_ago_s, {}),
    ):
        times = {clock: notice[clock] - ago_s for clock in ("at_s", "t_s")}
        events.append({"event": name, "generation": -1, "step": -1, **times, **values})
    (row,) = recoveries(events)
    assert row.stall_s == pytest.approx(stall_s, abs=1e-6)


@pytest.mark.parametrize(("complete_s", "stalls_s"), [(100.4, (600.4, 0.5)), (100.7, (600.7, 0.3))])
def test_a_pause_is_part_of_one_stall_though_two_failures_were_noticed_behind_it(complete_s, stalls_s):
    """Of the second one before or after the recovery from the first was complete."""
    events = []

    def event(name, at_s, generation=-1, **values):
        times = {"t_s": at_s, "at_s": at_s}
        events.append({"event": name, "generation": generation, "step": -1, **times, **values})

    event("decision", -900.0, 1, dead=[])
    event("stood_still", 100.0, lasted_s=600.0)
    for rank, noticed_s, resumed_s in ((1, 100.05, complete_s), (2, 100.6, 100.9)):
        event("failure_detected", noticed_s, rank, dead=[rank], cause="killed")
        event("decision", noticed_s, rank + 1, dead=[rank])
        event("recovered", resumed_s, rank + 1, dead=[rank], outcome="resume", resumed_s=resumed_s)
    assert [row.stall_s for row in recoveries(events)] == pytest.approx(stalls_s, abs=1e-6)


def test_a_step_that_is_reported_again_behind_a_pause_was_committed_before_it():
    """Rank 0 reported it, and has died: the next one that reports does so in the new generation."""
    events = []

    def event(name, at_s, generation, step=11, **values):
        events.append(
            {"event": name, "t_s": at_s, "at_s": at_s, "generation": generation, "step": step, **values}
        )

    event("decision", 10.0, 1, dead=[])
    event("step_committed", 80.0, 1, 10)
    event("step_committed", 110.0, 1)
    event("stood_still", 700.0, -1, lasted_s=650.0)
    event("failure_detected", 700.05, 1, dead=[0], cause="killed")
    event("decision", 700.1, 2, dead=[0])
    event("step_committed", 701.5, 2)
    event("recovered", 702.0, 2, rank=1, dead=[0], outcome="resume", resumed_s=702.0)
    assert [row.stall_s for row in recoveries(events)] == [pytest.approx(592.0)]
    older = NO_COMMITS.and_of(events)
    kept = [one for one in events if one["event"] != "step_committed"]
    assert recoveries(kept, older) == recoveries(events)


class Counted(list):
    """How often it was gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_a_thousand_recoveries_of_a_million_steps_are_found_without_going_through_them_a_thousand_times():
    common = {"step": 3, "at_s": 1.0, "t_s": 1.0}
    events = Counted([common | {"event": "decision", "generation": 1, "dead": []}])
    for generation in range(2, 52):
        events += [
            common | {"event": "failure_detected", "generation": generation - 1, "dead": [generation % 8]},
            common | {"event": "decision", "generation": generation, "dead": [generation % 8]},
            common
            | {"event": "recovered", "generation": generation, "dead": [generation % 8], "resumed_s": 1.5},
        ]
    assert {row.stall_s for row in recoveries(events)} == {0.5}
    assert events.times < 10
