"""The one state that terminal, page, metrics and report show, out of journals that are known line by line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from odyssey_megatron.codec import to_jsonable
from odyssey_megatron.errors import EXIT_FENCED, ConfigError
from odyssey_megatron.metrics import goodput, map
from odyssey_megatron.metrics.follow import Follower
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.live import live
from odyssey_megatron.metrics.standing import standing
from odyssey_megatron.metrics.suspects import suspects
from odyssey_megatron.metrics.timeline import last_job
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.watch import page
from odyssey_megatron.watch.screen import frame

from .synthetic_run import RANKS, SAVE_S, SECOND, SLOW, SLOWER_S, STEP_S, STEPS


def events_of(folder) -> list:
    return last_job(list(read_journal(folder)))


@pytest.fixture(scope="module")
def shot(runs):
    return live("shot_at", events_of(runs["shot_at"]))


def until(events, at: str, **fields):
    """The state when the first such line was written."""
    number = next(
        number
        for number, one in enumerate(events)
        if one["event"] == at and all(one[name] == value for name, value in fields.items())
    )
    return live("cut", events[: number + 1])


def test_every_second_is_in_one_bucket(shot, runs):
    worth = shot.goodput
    assert worth.productive_s + sum(one.seconds for one in worth.lost) == pytest.approx(worth.elapsed_s)
    events = events_of(runs["shot_at"])
    assert worth.elapsed_s == pytest.approx(events[-1]["at_s"] - events[0]["at_s"])
    assert worth.ideal_step_s == pytest.approx(STEP_S, rel=0.01)
    assert worth.productive_s == pytest.approx(STEPS * STEP_S, rel=0.01)


def test_the_job_has_begun_with_its_first_agent(runs, shot):
    """Which imports, and preloads, before it writes anything."""
    events = events_of(runs["shot_at"])
    launched = [
        one | {"launched_s": one["t_s"] - 25.0} if one["event"] == "job_started" else one for one in events
    ]
    lost = [goodput.by_bucket(one.goodput.lost) for one in (shot, live("launched", launched))]
    assert lost[1].pop(goodput.PREPARING) == pytest.approx(lost[0].pop(goodput.PREPARING, 0.0) + 25.0)
    assert lost[1] == pytest.approx(lost[0])


def test_what_was_lost_has_its_cause_and_its_tokens(shot):
    lost = goodput.by_bucket(shot.goodput.lost)
    assert lost[goodput.SAVING] == pytest.approx(SAVE_S, rel=0.02)
    assert lost[goodput.SLOW] == pytest.approx(len(SLOW) * SLOWER_S, rel=0.02)
    assert lost[goodput.RECOVERING] == pytest.approx(
        sum(one.stall_s or 0.0 for one in shot.stalls if one.is_failure)
    )
    assert lost[goodput.DONE_AGAIN] == pytest.approx((5 + 12) / 12 * STEP_S, rel=0.05), (
        "what was done of two steps"
    )
    (slow,) = (one for one in shot.goodput.lost if one.bucket == goodput.SLOW)
    assert slow.cause == "rank(s) 6 slow"
    assert slow.tokens == pytest.approx(len(SLOW) * SLOWER_S / STEP_S * 768, rel=0.02)


def test_evaluation_before_a_step_that_fails_is_no_work_that_is_done_again(runs):
    """At most as much as a redo takes is: of the second step that fails more time is left over, as of any other."""
    events, evaluation_s = events_of(runs["shot_at"]), 20.0
    begins = next(
        n for n, one in enumerate(events) if one["event"] == "step_committed" and one["step"] == SECOND - 1
    )
    later = [one | {"at_s": one["at_s"] + evaluation_s} for one in events[begins + 2 :]]
    lost = goodput.by_bucket(live("evaluates", [*events[: begins + 2], *later]).goodput.lost)
    assert lost[goodput.DONE_AGAIN] == pytest.approx((5 + 12) / 12 * STEP_S, rel=0.05)
    assert lost[goodput.OTHER] == pytest.approx(evaluation_s, rel=0.05)
    alone = [one for one in later if one["event"] != "step_committed" or one["step"] == SECOND]
    (few,) = (
        one
        for one in live("one step", [*events[: begins + 2], *alone]).goodput.lost
        if one.cause == "3 of 8 ranks missing"
    )
    assert few.seconds < STEP_S, "of a generation that has no other step nothing more is known"


def test_a_job_that_loses_nothing_is_all_good(runs):
    state = live("undisturbed", events_of(runs["undisturbed"]))
    lost = goodput.by_bucket(state.goodput.lost)
    assert lost.pop(goodput.SAVING) == pytest.approx(SAVE_S, rel=0.02)
    assert sum(lost.values()) < 0.02, "but for the launch"
    assert (state.suspects, state.findings, state.stalls) == ((), (), ())


def test_a_job_that_saves_in_each_step_loses_the_saves(runs):
    """The time of a step, and of an ideal one, is without what they waited for checkpoints."""
    saved, later_s = [], 0.0
    for one in events_of(runs["undisturbed"]):
        if one["event"] == "saved":
            continue
        saved.append(one | {"at_s": one["at_s"] + later_s})
        if one["event"] == "step_committed" and one["rank"] == RANKS - 1:
            later_s += SAVE_S
            saved.append(
                {"event": "saved", "at_s": one["at_s"] + later_s, "step": one["step"] + 1, "save_s": SAVE_S}
            )
    state = live("saves", saved)
    lost = goodput.by_bucket(state.goodput.lost)
    assert state.step_s == pytest.approx(STEP_S, rel=0.01)
    assert state.goodput.ideal_step_s == pytest.approx(STEP_S, rel=0.01)
    assert lost[goodput.SAVING] == pytest.approx((STEPS - 1) * SAVE_S, rel=0.01), (
        "the last one is after all steps"
    )


def test_each_worker_has_its_place(shot):
    here = shot.standing
    assert (here.stages, here.replicas) == (4, 2)
    assert {one.worker: (one.stage, one.replica) for one in here.places} == {
        w: (w // 2, w % 2) for w in range(8)
    }
    assert {one.worker for one in here.places if one.status == "dead"} == {0, 3, 5}
    assert {one.worker: one.spans for one in here.places if one.status == "trains"} == {
        1: ((0, 4),), 2: ((4, 7),), 4: ((0, 5),), 6: ((7, 10),), 7: ((5, 10),),
    }  # fmt: skip
    assert {one.worker: one.node for one in here.places} == {w: f"host{w // 4}" for w in range(8)}
    assert here.places[6].slowness == 1.0
    assert shot.findings == (), "it is as fast as others again"


def test_how_many_more_losses_each_layer_survives(runs, shot):
    events = events_of(runs["shot_at"])
    before = until(events, "job_started").standing
    assert before.survives is None, "no plan yet"
    start = until(events, "step_committed", step=0).standing
    assert {(one.first, one.last): one.survives for one in start.margins} == {
        (0, 3): 1, (3, 5): 1, (5, 7): 1, (7, 10): 1
    }  # fmt: skip
    assert start.survives_nodes == 0, "both holders of a stage are on one host"
    one_dead = until(events, "failure_detected")
    assert {(one.first, one.last): one.survives for one in one_dead.standing.margins} == {
        (0, 3): 1, (3, 5): 1, (5, 7): 0, (7, 10): 1
    }  # fmt: skip
    assert one_dead.status == "recovering"
    assert [(one.first, one.last, one.survives) for one in shot.standing.margins] == [
        (0, 4, 1), (4, 5, 1), (5, 7, 1), (7, 10, 1),
    ]  # fmt: skip
    assert shot.status == "ended"
    assert shot.standing.survives_nodes == 0


def test_nodes_that_have_one_name_are_told_apart(runs):
    """By their agents, as the job itself does: containers may all be called the same."""
    events = [
        # The holders of a stage are on different nodes.
        event | ({"host": "same", "source": f"agent{event['target'] % 2}"} if "pid" in event else {})
        for event in events_of(runs["undisturbed"])
    ]
    assert live("same", events).standing.survives_nodes == 1


def test_a_plan_that_is_only_offered_is_not_in_force(runs):
    events = events_of(runs["shot_at"])
    offered = until(events, "decision", policy="fill")
    assert offered.standing.generation == 2
    assert offered.status == "trains"
    switched = until(events, "switched")
    assert switched.standing.generation == 3
    for state, plan in ((offered, "generation 2 reroute"), (switched, "generation 3 fill")):
        assert f" · {plan} · " in frame(state, now_s=0.0, width=120, colours=False)


def test_who_is_slow_now_with_the_evidence(runs):
    events = events_of(runs["shot_at"])
    state = until(events, "measured")
    (found,) = state.findings
    assert (found.kind, found.ranks, found.factor) == ("slow worker", (6,), 2.0)
    assert {one.worker: one.slowness for one in state.standing.places if one.slowness != 1.0} == {
        0: None, 3: None, 5: None, 6: 2.0
    }  # fmt: skip
    assert {one.node for one in state.suspects if one.is_to_exclude} == {"host1"}
    assert "rank 6 is slow: it takes twice the time" in state.suspects[0].evidence
    first = state.costs[0]
    assert (first.first, first.last, first.kind) == (0, 4, "forward")


def test_a_rank_may_be_slow_where_its_node_is_not_any_more(runs):
    events = [one for one in events_of(runs["shot_at"]) if one["event"] in ("rank_started", "job_started")]
    for kind, ranks, speed in (
        ("slow worker", [5], 0.5), ("slow worker", [6], 0.5), ("slow node", [5, 6], 0.5),
        ("slow worker", [6], 1.0), ("slow node", [5, 6], 1.0),
    ):  # fmt: skip
        told = {"event": "slowness", "kind": kind, "slow_ranks": ranks, "speed": speed, "why": "lasts"}
        events.append({**events[-1], **told})
    (found,) = suspects(events)
    assert found.evidence == ("rank 5 is slow: it lasts",)


def test_the_ends_of_a_slow_link_are_not_excluded_but_a_node_with_a_slow_network_is(runs):
    events = [one for one in events_of(runs["shot_at"]) if one["event"] in ("rank_started", "job_started")]
    (last,) = events[-1:]

    def slowness(kind, ranks, speed):
        return {
            **last,
            "event": "slowness",
            "kind": kind,
            "slow_ranks": ranks,
            "speed": speed,
            "why": "it lasts",
        }

    link = slowness("slow link", [0, 6], 0.25)
    assert [(one.node, one.is_to_exclude) for one in suspects([*events, link])] == [
        ("host0", False), ("host1", False)
    ]  # fmt: skip
    (network,) = suspects([*events, slowness("slow network", [5, 6], 0.25)])
    assert (network.node, network.is_to_exclude) == ("host1", True)
    assert "slow network of rank(s) 5, 6: it lasts" in network.evidence
    assert suspects([*events, link, slowness("slow link", [0, 6], 1.0)]) == ()
    assert suspects([*events, slowness("slow sums", [0, 6], 0.25)]) == (), "either node may be at fault"
    assert suspects([*events, slowness("slow sums", [5, 6], 0.25)])[0].is_to_exclude, "named alone"


def test_whose_ranks_were_replaced_is_watched_and_then_excluded_where_they_were(runs):
    events = [one for one in events_of(runs["shot_at"]) if one["event"] in ("rank_started", "job_started")]
    (last,) = events[-1:]
    left = {**last, "event": "replaced", "slow_ranks": [6], "cost_s": 42.0}
    (watched,) = suspects([*events, left])
    assert (watched.node, watched.is_to_exclude) == ("host1", False)
    assert watched.evidence == ("rank(s) 6 replaced: being slow had cost 42 s of training",)
    elsewhere = {**next(one for one in events if one.get("target") == 6), "host": "host9"}
    assert [one.node for one in suspects([*events, left, elsewhere])] == ["host1"], "where it was then"
    assert suspects([*events, left, left])[0].is_to_exclude


def started(hosts):
    """``hosts``: of each rank."""
    return [{"event": "rank_started", "target": rank, "host": host} for rank, host in hosts.items()]


def died(dead, causes, codes, generation=1):
    told = {"dead": dead, "causes": causes, "code": codes, "cause": ",".join(sorted({*causes}))}
    return {"event": "failure_detected", "generation": generation, **told}


def test_a_node_is_not_suspected_for_what_another_one_of_its_cell_has_done():
    """A gang of four ranks on two nodes loses its first rank twice."""
    events = started({rank: f"host{rank // 2}" for rank in range(4)})
    events += [died([0, 1, 2, 3], ["killed", "cell", "cell", "cell"], [-9] * 4, number) for number in (1, 2)]
    (suspect,) = suspects(events)
    assert (suspect.node, suspect.is_to_exclude) == ("host0", True)
    assert suspect.evidence[0] == "rank(s) 0 lost in generation 1: killed"
    lost = died([0, 1, 2, 3], ["cell", "cell", "node", "node"], [-9] * 4)
    assert [(one.node, one.is_to_exclude) for one in suspects([*events[:4], lost])] == [("host1", True)]


def test_injected_deaths_say_nothing_of_a_node():
    events = [
        *started({0: "host0", 1: "host1"}), {"event": "injected", "rank": 0},
        died([0], ["killed"], [-9]), died([0], ["killed"], [-9], 2), died([0], ["node"], [-9], 3),
    ]  # fmt: skip
    (suspect,) = suspects(events)
    assert (suspect.node, suspect.is_to_exclude) == ("host0", False)
    assert suspect.evidence[0] == "rank(s) 0 lost in generation 1: killed (injected)"
    others = [died([1], ["killed"], [-9], 4), died([1], ["killed"], [-9], 5)]
    assert [(one.node, one.is_to_exclude) for one in suspects([*events, *others])] == [
        ("host1", True),
        ("host0", False),
    ]
    again = [*started({0: "host0"}), died([0], ["killed"], [-9], 6), *started({0: "host0"})]
    (suspect,) = suspects([*events, *again, died([0], ["killed"], [-9], 7)])
    assert suspect.is_to_exclude, "nobody has injected the deaths of its later processes"


def test_a_lost_node_is_suspected_and_not_the_one_that_came_in_its_place():
    events = [
        *started({0: "host0", 1: "host1"}), died([1], ["node"], [-9]), *started({1: "host9"}),
        died([1], ["exit"], [EXIT_FENCED], 3),
    ]  # fmt: skip
    (suspect,) = suspects(events)
    assert (suspect.node, suspect.is_to_exclude) == ("host1", True), "the other one was asked to leave"


def test_a_node_is_watched_for_deaths_that_were_injected(shot):
    assert [(one.node, one.is_to_exclude) for one in shot.suspects] == [("host0", False), ("host1", False)]
    assert "(injected)" in shot.suspects[0].evidence[0]


def test_the_last_decision_is_the_one_that_weighed(shot):
    assert shot.decision.generation == 6
    assert [row["name"] for row in shot.decision.candidates] == ["reroute", "replan", "replan 2+5"]
    assert shot.planned_step_s == 0.55


def test_following_says_the_same_as_reading_it_all(runs, tmp_path, shot):
    """Whatever part of a line has been written when it is looked."""
    files = {path.name: path.read_bytes() for path in (runs["shot_at"] / "journal").iterdir()}
    (tmp_path / "journal").mkdir()
    follower, parts = Follower(tmp_path), 7
    for part in range(1, parts + 1):
        for name, raw in files.items():
            with (tmp_path / "journal" / name).open("ab") as file:
                file.write(raw[len(raw) * (part - 1) // parts : len(raw) * part // parts])
        state = live("shot_at", follower.events())
    assert state == shot
    assert live("shot_at", follower.events()) == shot, "nothing is new"


def test_following_goes_to_the_next_job_in_the_folder(runs, tmp_path):
    follower = None
    for name, job in (("shot_at", "ab12cd34"), ("undisturbed", "0f0f0f0f")):
        for path in (runs[name] / "journal").iterdir():
            (tmp_path / "journal").mkdir(exist_ok=True)
            with (tmp_path / "journal" / path.name).open("a") as file:
                file.write(path.read_text().replace("ab12cd34", job))
        follower = follower or Follower(tmp_path)
        state = live("run", follower.events())
        assert (state.job, bool(state.stalls)) == (job, name == "shot_at")


def test_a_file_that_is_another_one_by_now_is_read_from_its_start(runs, tmp_path):
    """As where somebody has cut it, or a disk was full and the folder was made anew."""
    (tmp_path / "journal").mkdir()
    path = tmp_path / "journal" / "rank0.jsonl"
    first, second = (next((runs[name] / "journal").glob("rank0*")) for name in ("shot_at", "undisturbed"))
    path.write_bytes(first.read_bytes())
    follower = Follower(tmp_path)
    assert follower.events()
    lines = second.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))
    assert follower.events() == Follower(tmp_path).events()


def test_a_line_that_is_none_of_a_journal_is_said_each_time_and_costs_no_others(runs, tmp_path):
    (tmp_path / "journal").mkdir()
    path = tmp_path / "journal" / "rank0.jsonl"
    raw = next((runs["undisturbed"] / "journal").glob("rank0*")).read_bytes()
    path.write_bytes(b'{"schema_version": 99}\n' + raw)
    follower = Follower(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="schema_version 99"):
            follower.events()
    path.write_bytes(b" " * 22 + b"\n" + raw)
    assert follower.events() == Follower(tmp_path).events()


def test_what_a_job_says_of_slow_ranks_is_not_gone_through_for_each_step():
    """Ranks 1, 2, ... are slow for 4 s each, every 10 s; of two at once the first counts."""
    told = [
        {"event": "slowness", "kind": "slow worker", "slow_ranks": [rank], "speed": speed, "at_s": at_s}
        for rank in range(1, 4)
        for at_s, speed in ((10.0 * rank, 0.5), (10.0 * rank + 4, 1.0))
    ]
    slow = goodput._Slowness([*told[:1], {**told[0], "slow_ranks": [7], "at_s": 12.0}, *told[1:]])
    asked = ((0, 10), (0, 10.1), (13, 20), (14, 15), (20, 21), (35, 99))
    assert [slow.ranks(one) for one in slow.between(*np.array(asked, float).T)] == [
        "", "rank(s) 1 slow", "rank(s) 1 slow", "rank(s) 7 slow", "rank(s) 7 slow", "rank(s) 7 slow"
    ]  # fmt: skip
    for never, since_s, until_s in ((goodput._Slowness([]), 0, 1), (goodput._Slowness(told), 14, 20)):
        assert not never.between(np.array([since_s]), np.array([until_s])).any()


def test_a_gpu_is_given_up_until_it_is_readmitted(runs):
    events = events_of(runs["shot_at"])
    given = {"event": "given_up", "target": 3, "slot": 1, "host": "host0", "at_s": 0.0}
    state = live("given up", [*events, given, given | {"slot": 2, "target": 5}])
    assert [(one.rank, one.slot, one.host) for one in state.given_up] == [(3, 1, "host0"), (5, 2, "host0")]
    assert "GPU 1 of host0 (rank 3); GPU 2 of host0 (rank 5)" in map.heat_map(state)
    back = given | {"event": "readmitted", "target": 7}
    assert [one.slot for one in live("back", [*events, given, back]).given_up] == []
    assert "readmit" not in map.heat_map(live("back", [*events, given, back]))
    started_again = {"event": "rank_started", "target": 3, "host": "host0", "at_s": 0.0}
    assert live("on another GPU", [*events, given, started_again]).given_up
    assert not live("another node", [*events, given, started_again | {"host": "host9"}]).given_up


def test_a_checkpoint_is_missing_until_a_later_one_is_saved(runs):
    """A save in the background is journalled as it begins, too; what is journalled last says what came of it."""
    events = events_of(runs["undisturbed"])
    at = {"at_s": events[-1]["at_s"], "step": STEPS}
    saved = at | {"event": "saved", "save_s": 0.0}
    failed = at | {"event": "not_saved", "why": "no space <left>"}
    told = f"the checkpoint of iteration {STEPS} was not saved: no space <left>"
    running = [one for one in events if one["event"] != "job_finished"]
    over = [one for one in events if one not in running]
    for more, text in (
        ([saved], ""),
        ([saved, failed], told),
        ([saved, failed, saved], told),
        ([saved, failed, saved, saved], ""),
        ([saved, failed, saved, saved, failed], told),
        ([saved, failed, *over], told),
        ([saved, failed, saved, *over], ""),
    ):
        state = live("full disk", [*running, *more])
        assert (state.not_saved, state.saves_failed) == (text, more.count(failed))
        assert (told in frame(state, now_s=0.0)) == bool(text)
        assert ("no space &lt;left&gt;" in page.part(state)) == bool(text)


def test_what_all_say_alike_is_kept_once(tmp_path, runs):
    """Of a long job the state is made anew each second."""
    follower = Follower(runs["shot_at"])
    kept = follower.events()
    assert len([one for one in kept if one["event"] == "step_committed"]) == STEPS
    assert not [one for one in kept if one["event"] in ("trace", "samples")]
    decided = [one for one in kept if one["event"] == "decision"]
    assert not any("schedule" in one for one in decided), "of many workers it is most of a journal"
    assert [one["generation"] for one in decided if "layout" in one] == [1, 6], "the first, and that of now"
    assert json.dumps(kept, default=str)


def test_a_cell_that_has_lost_ranks_trains_with_fewer():
    """Cells of two ranks; worker 1 has rank 2 alone, as 3 is lost for good."""
    layout = to_jsonable(layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0,)),)))
    common = {"event": "decision", "layout": layout, "cell_size": 2, "planned": True}
    events = [
        common | {"generation": 1, "shapes": []},
        {"event": "generation_started", "generation": 1, "members": [0, 1, 2, 3]},
        {"event": "failure_detected", "dead": [2, 3]},
        {"event": "rank_joined", "target": 2},
        common | {"generation": 2, "shapes": [[1, 1]]},
    ]
    assert [one.status for one in standing(events, 4).places] == ["trains", "dead"]
    events += [
        {"event": "generation_started", "generation": 2, "members": [0, 1, 2]},
        {"event": "switched", "rank": 2},
    ]
    now = standing(events, 4)
    assert [(one.status, one.ranks_text) for one in now.places] == [
        ("trains", "rank 0–1"),
        ("trains", "rank 2, 1 of 2 ranks"),
    ]
    assert now.survives == 0


def test_who_has_agreed_on_a_generation_since_it_died_lives():
    """Journals of earlier versions may tell of a rank's death behind its return."""
    layout = to_jsonable(layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0,)),)))
    common = {"event": "decision", "layout": layout, "cell_size": 1}
    began = {"event": "generation_started", "members": [0, 1], "t_s": 9.0}
    events = [
        common | {"generation": 1},
        began | {"generation": 1, "at_s": 109.0, "agreed_s": 8.0},
        {"event": "rank_joined", "target": 1},
        {"event": "failure_detected", "dead": [1], "at_s": 120.0},
        common | {"generation": 2},
    ]
    assert standing(events, 2).dead == {1}
    for agreed_s, dead in ((25.0, set()), (19.0, {1})):
        later = began | {"generation": 2, "at_s": 126.0, "t_s": 26.0, "agreed_s": agreed_s}
        assert standing([*events, later], 2).dead == dead


@pytest.mark.parametrize(("version", "shape"), [(2, [1, 4]), (3, [1, 1])])
def test_a_smaller_cell_of_an_earlier_journal_is_as_large_as_it_was(version, shape):
    """It had the number of places that each rank fills, where there is a number of ranks now."""
    layout = to_jsonable(layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0,)),)))
    common = {"event": "decision", "layout": layout, "cell_size": 4, "schema_version": version}
    events = [
        common | {"generation": 1, "shapes": [shape]},
        {"event": "generation_started", "generation": 1, "members": [0, 1, 2, 3, 4]},
    ]
    assert [one.ranks for one in standing(events, 8).places] == [(0, 1, 2, 3), (4,)]
