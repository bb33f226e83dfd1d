import json
import math
import re
from dataclasses import replace
from functools import partial

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.config import OdysseyConfig, policies
from odyssey_megatron.errors import ConfigError, PlanInfeasible
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.scheduling.generate import order_routes
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.routes.rerouting import reroute
from odyssey_megatron.studies import odyssey
from odyssey_megatron.studies.baselines import (
    Bamboo,
    Restart,
    Running,
    System,
    World,
    fits,
    one_f_one_b_step_s,
    stopped,
)
from odyssey_megatron.studies.cells import CellsChange
from odyssey_megatron.studies.chameleon import Chameleon
from odyssey_megatron.studies.odyssey import Odyssey
from odyssey_megatron.studies.oobleck import Oobleck
from odyssey_megatron.studies.playing import compare, play
from odyssey_megatron.studies.recycle import ReCycle
from odyssey_megatron.studies.stagger import staggered_step_s
from odyssey_megatron.studies.trace import (
    ClusterChange,
    FailureTrace,
    monotone,
    read_trace,
    with_repairs,
)
from odyssey_megatron.studies.traceplay import SYSTEMS, main_simulate, plot
from odyssey_megatron.studies.whatif import main_plan
from tests.plan.samples import uniform_costs
from tests.plan.test_generate import pipelines

COSTS = uniform_costs(8, ends=True)
WORLD = World(
    job=JobSpec(
        num_layers=10,
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=1,
        num_microbatches=16,
        tokens_per_step=1000,
        train_steps=1,
    ),
    profile=Profile(costs=COSTS, group_build_s=2.0),
    workers=tuple(range(8)),
    mtbf_s=3600.0,
)


class Still(System):
    """10 s a step; stands still for 100 s at each change."""

    name = "still"

    def start(self, world):
        return Running(layout=None, step_s=10.0, downtime_s=0.0)

    def change(self, world, running, alive):
        return Running(layout=None, step_s=10.0 * 8 / len(alive), downtime_s=100.0)


def test_without_cells_flags_of_cells_change_nothing():
    trace = with_repairs(WORLD.workers, mtbf_s=4000.0, repair_s=6000.0, duration_s=40_000.0, seed=5)
    told = replace(WORLD, gpus_per_node=4, start_s=1.0)
    plain, asked = (
        compare((one,), told, trace) for one in (Odyssey, partial(Odyssey, OdysseyConfig(respawn=2)))
    )
    assert plain == asked == compare((Odyssey,), WORLD, trace)
    assert plain[0].smaller == 0


def test_play_adds_up():
    trace = FailureTrace(
        name="one", changes=(ClusterChange(t_s=500.0, died=(0, 1, 2, 3)),), duration_s=1000.0, mtbf_s=500.0
    )
    played = play(Still(), WORLD, trace)
    assert played.tokens_per_s * 1000 == pytest.approx(500 * 100 + (1000 - 500 - 105) * 50)
    assert played.downtime_s == 105.0


def test_a_change_during_a_downtime_starts_it_again():
    changes = (ClusterChange(t_s=500.0, died=(0,)), ClusterChange(t_s=550.0, joined=(0,)))
    played = play(Still(), WORLD, FailureTrace(name="two", changes=changes, duration_s=1000.0, mtbf_s=500.0))
    assert played.tokens_per_s * 1000 == pytest.approx(500 * 100 + (1000 - 650) * 100)


def test_traces():
    trace = monotone(range(8), 600.0, 4)
    assert [change.t_s for change in trace.changes] == [600.0, 1200.0, 1800.0, 2400.0]
    assert len({change.died for change in trace.changes}) == 4
    assert trace == monotone(range(8), 600.0, 4)
    assert trace.mtbf_s == 600.0
    random = with_repairs(range(8), mtbf_s=1000.0, repair_s=2000.0, duration_s=50_000.0, seed=3)
    assert random.mtbf_s == 1000.0
    up = set(range(8))
    for change in random.changes:
        assert set(change.died) <= up
        assert not set(change.joined) & up
        up = (up - set(change.died)) | set(change.joined)
        assert len(up) >= 4
    text = "10 kill 3\n20 join 3  # repaired\n30 end\n"
    assert read_trace(text, 8).changes == (
        ClusterChange(t_s=10.0, died=(3,)),
        ClusterChange(t_s=20.0, joined=(3,)),
    )
    text = "10 kill 1:1\n20 kill 1:*\n30 join 1:*\n40 join 0:*\n" + "5 kill 0\n50 end\n"
    assert read_trace(text, 8, gpus_per_node=4).changes == (
        ClusterChange(t_s=5.0, died=(0,)),
        ClusterChange(t_s=10.0, died=(5,)),
        ClusterChange(t_s=20.0, died=(4, 6, 7)),
        ClusterChange(t_s=30.0, joined=(4, 5, 6, 7)),
        ClusterChange(t_s=40.0, joined=(0,)),
    )
    text = "5 join 0\n5 kill 2\n5 kill 4\n5 join 4\n7 end\n1 kill 0\n1 kill 1\n"
    at_once = read_trace(text, 8)
    assert at_once.changes == (
        ClusterChange(t_s=1.0, died=(0, 1)),
        ClusterChange(t_s=5.0, joined=(0,)),
        ClusterChange(t_s=5.0, died=(2, 4)),
        ClusterChange(t_s=5.0, joined=(4,)),
    )
    assert at_once.mtbf_s == 7.0 / 2


def test_random_failures_may_take_whole_nodes():
    asked = {"mtbf_s": 1000.0, "repair_s": 500.0, "duration_s": 90_000.0, "seed": 3, "gpus_per_node": 4}
    assert with_repairs(range(16), **asked, node_share=0.0) == with_repairs(
        range(16), **asked | {"gpus_per_node": 1}
    )
    found = with_repairs(range(16), **asked, node_share=0.5)
    nodes = [change.died for change in found.changes if len(change.died) > 1]
    assert all(len({gpu // 4 for gpu in died}) == 1 for died in nodes)
    assert 0.3 < len(nodes) / sum(bool(change.died) for change in found.changes) < 0.7
    assert found.name.endswith("50% of whole nodes")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10 explode 3\n20 end", "line 1, '10 explode 3': 'SECONDS kill"),
        ("10 kill 3", "must close"),
        ("", "must close"),
        ("nan kill 3\n20 end", "line 1, 'nan kill 3': a number from 0 to"),
        ("-1 kill 3\n20 end", "found -1"),
        ("10 kill 3\ninf end", "found inf"),
        ("10 kill 8\n20 end", "8: no such GPU. Write NODE:GPU or a rank, 0..7"),
        ("10 kill 0:*\n11 kill 0:*\n20 end", "line 2, '11 kill 0:*': every GPU of it is dead by then"),
        ("10 kill 1:2\n20 end", "1:2: no such GPU"),
        ("10 kill 0:x\n20 end", "0:x: no such GPU"),
        ("10 kill 3\n11 kill 3\n20 end", "line 2, '11 kill 3': the GPU is dead by then"),
        ("10 join 3\n20 end", "the GPU is alive by then"),
        ("10 kill three\n20 end", "three: no such GPU"),
        ("1 kill 1\n2 join 1\n" * 10_000 + "20 end", "it has 20,000 changes, and at most 10,000 are played"),
    ],
)
def test_what_no_trace_can_say(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_trace(text, 8)


def test_one_f_one_b_is_equation_9():
    layout = pipelines(4, 3, 6)
    assert one_f_one_b_step_s(layout, uniform_costs(4)) == (4 + 6 - 1) * 3 == 27


def test_staggering_hides_the_reroute():
    """ReCycle's 27 slots (arXiv 2405.14009): an interior failure costs nothing with six in flight."""
    layout, costs = pipelines(4, 3, 6), uniform_costs(4)
    after = reroute(layout, set(layout.workers) - {3}, costs)
    order = order_routes(after, costs, in_flight_cap=dict.fromkeys(after.workers, 6))
    assert 27 <= staggered_step_s(after, costs, order.done_s) <= 28


def test_oobleck_keeps_borrows_and_merges():
    oobleck = Oobleck()
    assert oobleck._regroup([[0, 1], [2, 3, 4]], 2) == [[0, 1], [2, 3, 4]]
    assert oobleck._regroup([[0], [2, 3, 4]], 2) == [[0, 4], [2, 3]]
    assert oobleck._regroup([[0], [2, 3]], 2) == [[2, 3, 0]]
    assert oobleck._regroup([[0]], 2) == []


def test_memory_rules_out():
    state = 2 * 4  # two layers a stage
    layout = layout_from_routes(10, (pipeline_route((0, 1, 2, 3), (3, 5, 7, 10), tuple(range(8))),))
    assert fits(layout, replace(COSTS, memory_bytes=state + 4 + 2 * 4))
    assert not fits(layout, replace(COSTS, memory_bytes=state + 4))
    small = replace(WORLD, profile=Profile(costs=replace(COSTS, memory_bytes=20)))
    assert math.isinf(Bamboo().start(small).step_s)


JOB = "--cluster 1x8 --model llama2-7b --pipeline-model-parallel-size 4 --num-microbatches 16".split()


@pytest.fixture
def played(capsys, tmp_path):
    """Systems by name, of a trace of a job of eight GPUs with four stages."""

    def of(*flags: str, trace: str = "100 end") -> dict[str, dict[str, object]]:
        path = tmp_path / "trace"
        path.write_text(trace)
        assert main_simulate([*JOB, "--trace", str(path), "--json", *flags]) == 0
        got = json.loads(capsys.readouterr().out)
        return {"notes": got["notes"]} | {one["system"]: one for one in got["traces"][0]["systems"]}

    return of


def test_other_systems_need_memory(played):
    """29 GiB of state and four microbatches of 4 GiB fit into 90 % of 54 GiB, and not into those of 50."""
    found = {gib: played("--gpu-memory-gib", str(gib)) for gib in (50, 54)}
    for name in ("restart", "recycle", "chameleon"):
        assert [found[gib][name]["tokens_per_s"] > 0 for gib in (50, 54)] == [False, True], name
        assert found[50][name]["history"][0][2] == "out of memory"
    for name in ("odyssey", "oobleck", "recycle, our order"):
        assert found[50][name]["tokens_per_s"] > 0, name
    cut = played("--gpu-memory-gib", "45", "--use-distributed-optimizer")
    assert cut["restart"]["tokens_per_s"] > 0


def test_first_plans_are_those_of_odyssey_plan(played, capsys):
    """Messages are kept until a step's end only where the memory for them is worth it."""
    found = played("--gpu-memory-gib", "50")
    for system, flags in (("odyssey", []), ("odyssey, layout auto", ["--odyssey-layout", "auto"])):
        assert main_plan([*JOB, "--gpu-memory-gib", "50", "--json", *flags]) == 0
        step_s = json.loads(capsys.readouterr().out)["before"]["step_s"]
        assert found[system]["tokens_per_s"] == pytest.approx(16 * 2 * 4096 / step_s)


def test_what_a_restart_costs_is_said_by_the_job(played):
    found = played("--odyssey-restart-s", "30", trace="100 kill 0\n100 kill 1\n1000 end")
    for name in ("only reroute", "restart"):
        assert found[name]["restarts"], name
        assert found[name]["downtime_s"] == pytest.approx(30.0), name


@pytest.mark.parametrize(
    ("flags", "row"),
    [("--odyssey-policy reroute", "only reroute"), ("--odyssey-layout auto", "odyssey, layout auto")],
)
def test_ours_is_played_by_its_settings(played, flags, row):
    trace = "100 kill 3\n1000 end"
    asked, plain = played(*flags.split(), trace=trace), played(trace=trace)
    assert asked["odyssey"] | {"system": row} == plain[row] != plain["odyssey"] | {"system": row}
    assert row not in asked
    assert asked["restart"] == plain["restart"]


def test_settings_that_do_not_count_are_named(played):
    notes = "\n".join(
        played("--odyssey-mtbf-s", "999", "--odyssey-restart-s", "9", "--odyssey-respawn", "1")["notes"]
    )
    assert "--odyssey-mtbf-s does not count: plans go by the mean" in notes
    assert "--odyssey-respawn does not count: a worker is one GPU" in notes
    assert notes.count("does not count") == 2
    assert "does not count" not in "".join(played()["notes"])


@pytest.mark.parametrize("system", [Odyssey, Restart, Bamboo, Chameleon, ReCycle])
def test_all_start_with_the_stages_of_the_launch_line(system):
    """And restart with them."""
    uneven, one = replace(WORLD, job=replace(WORLD.job, stage_layers=(1, 3, 3, 1))), system()
    healthy = one.start(uneven)
    after = one.go_on(uneven, healthy, CellsChange(t_s=1.0, alive=(4, 5, 6, 7), lost=True))
    assert after.restarted
    for running in (healthy, after):
        assert {tuple(hop.last for hop in route.hops) for route in running.layout.routes} == {(2, 5, 8, 10)}


def test_what_does_not_fit_on_fewer_replicas_stands_still(capsys, tmp_path):
    """With a distributed optimizer."""
    trace = tmp_path / "trace"
    trace.write_text("".join(f"{10 + worker} kill {worker}\n" for worker in range(13)) + "300 end\n")
    asked = "--cluster 2x8 --model llama2-13b --pipeline-model-parallel-size 2 --num-microbatches 2"
    asked += f" --use-distributed-optimizer --trace {trace} --json"
    assert main_simulate(asked.split()) == 0
    (got,) = json.loads(capsys.readouterr().out)["traces"]
    notes = {one["system"]: one["history"][-1][2] for one in got["systems"]}
    assert notes["odyssey"] == "out of memory"


@pytest.mark.parametrize("system", SYSTEMS)
def test_who_has_lost_everything_stands_still_and_restarts(system):
    changes = (
        ClusterChange(t_s=500.0, died=tuple(range(8))),
        ClusterChange(t_s=1500.0, joined=tuple(range(8))),
    )
    played = play(
        system(), WORLD, FailureTrace(name="all", changes=changes, duration_s=5000.0, mtbf_s=3600.0)
    )
    assert played.downtime_s >= 1000 + WORLD.profile.restart_s
    assert played.restarts == 1


WORK_S = 16 * 8 * 3.0
"""Of all layers and microbatches of a step in :data:`WORLD`, on one worker."""


def deaths(*dead: tuple[float, tuple[int, ...]]) -> FailureTrace:
    changes = tuple(ClusterChange(t_s=t_s, died=died) for t_s, died in dead)
    return FailureTrace(name="deaths", changes=changes, duration_s=2e4, mtbf_s=3600.0)


def test_a_restart_trains_on_whole_pipelines():
    """1F1B on two pipelines, 11 slots of 6 s; after a loss on one, 19 of them, once it has restarted."""
    (played,) = compare((Restart,), WORLD, deaths((1e4, (5,))))
    expected = 1e4 * 1000 / (11 * 6.0) + (1e4 - WORLD.profile.restart_s) * 1000 / (19 * 6.0)
    assert played.tokens_per_s * 2e4 == pytest.approx(expected)
    assert played.downtime_s == pytest.approx(WORLD.profile.restart_s)


def test_a_restart_costs_all_the_same():
    """Both holders of a stage are lost."""
    played = compare(SYSTEMS, WORLD, deaths((1e4, (0, 1))))
    still_s = {one.system: one.downtime_s for one in played if one.restarts}
    assert {"odyssey", "only reroute", "chameleon", "recycle", "restart"} <= set(still_s)
    assert list(still_s.values()) == pytest.approx([WORLD.profile.restart_s] * len(still_s))


@pytest.mark.parametrize(
    "change", [ClusterChange(t_s=10_010.0, died=(3,)), ClusterChange(t_s=10_010.0, joined=(0,))]
)
def test_no_change_ends_a_restart(change):
    """Nobody trains sooner for one more loss, or for a repair."""
    world, lost = replace(WORLD, workers=tuple(range(12))), deaths((1e4, (0, 1, 2)))
    both = replace(lost, changes=(*lost.changes, change))
    alone, found = ({one.system: one for one in compare(SYSTEMS, world, trace)} for trace in (lost, both))
    restarted = [one for one in alone.values() if one.restarts]
    assert len(restarted) > 5
    for one in restarted:
        assert found[one.system].downtime_s >= WORLD.profile.restart_s, one.system


ALIVE = (1, 2, 3, 5, 6, 7, 9, 10, 11)


def restarted(one, world=WORLD, given_up=False):
    """How ``one``, which began on twelve workers, restarts on :data:`ALIVE`; ``given_up``: it kept no messages."""
    world = replace(world, workers=tuple(range(12)))
    one.start(world)
    if given_up:
        one.now = one.now._replace(profile=one.now.profile.without_messages)
    change = CellsChange(t_s=1.0, alive=ALIVE, lost=False)
    return one.go_on(world, stopped("too few workers"), change)


@pytest.mark.parametrize("slower", [0.0, 0.3])
def test_a_restart_begins_as_a_job_does(slower):
    """On the whole pipelines of whoever lives, under ``--odyssey-layout auto`` with the best layout of these; as much
    slower for memory, and with messages that the job before gave up.
    """
    world, steps_s = replace(WORLD, job=replace(WORLD.job, slower_for_memory=slower)), []
    for config in (OdysseyConfig(), OdysseyConfig(layout="auto")):
        one, of_eight = Odyssey(config), Odyssey(config).start(world)
        after = restarted(one, world, given_up=True)
        assert after.restarted
        assert after.layout.workers == one.now.plan.layout.workers == ALIVE[:8]
        assert after.step_s == of_eight.step_s
        assert one.now.profile.costs.keeps_messages
        steps_s.append(after.step_s)
    assert steps_s[1] < 0.99 * steps_s[0]
    assert (steps_s[0] > Odyssey().start(WORLD).step_s) == bool(slower)


def test_a_large_restart_has_the_layout_of_the_launch_line(monkeypatch):
    """Otherwise each number of workers would be searched for as long as for a start."""
    own, best = (restarted(Odyssey(OdysseyConfig(layout=one))) for one in ("megatron", "auto"))
    monkeypatch.setattr(odyssey, "_MOST_PREPARED", 7)
    large = restarted(Odyssey(OdysseyConfig(layout="auto")))
    assert large.layout == own.layout != best.layout


def test_a_large_restart_for_which_that_layout_is_too_large_has_the_best_one(monkeypatch):
    """Its job would start, too."""
    world = replace(WORLD, profile=Profile(costs=replace(COSTS, memory_bytes=12)))
    best = restarted(Odyssey(OdysseyConfig(layout="auto")), world)
    with pytest.raises(PlanInfeasible):
        Odyssey().start(world)
    monkeypatch.setattr(odyssey, "_MOST_PREPARED", 7)
    large = restarted(Odyssey(OdysseyConfig(layout="auto")), world)
    assert large.restarted
    assert large.layout == best.layout


def test_that_a_restart_does_not_fit_is_found_out_once(monkeypatch):
    made = []
    planner = odyssey.PolicyPlanner
    monkeypatch.setattr(odyssey, "PolicyPlanner", lambda *a, **given: made.append(1) or planner(*a, **given))
    small = replace(WORLD, profile=Profile(costs=replace(COSTS, memory_bytes=9)))
    for _ in range(2):
        with pytest.raises(PlanInfeasible):
            Odyssey().start(small)
    assert len(made) == 1


def test_a_restart_with_too_few_workers_for_the_redundancy_is_none():
    """A job with them is refused."""
    world = replace(WORLD, job=replace(WORLD.job, least_holders=9), workers=tuple(range(12)))
    after = restarted(Odyssey(OdysseyConfig(redundancy="state", redundancy_level=8)), world)
    assert (after.layout, after.note) == (None, "restart: too few workers")


def test_nothing_is_trained_while_it_stands_still():
    (played,) = compare((Restart,), WORLD, deaths((1e4, (5,)), (1.2e4, (0, 1, 2, 3, 4, 6, 7))))
    slow, (healthy, *_) = 1000 / (19 * 6.0), [rate for _, rate, _ in played.history]
    assert [one[:2] for one in played.history] == [
        (0.0, healthy),
        (1e4, 0.0),
        (1e4 + WORLD.profile.restart_s, pytest.approx(slow)),
        (1.2e4, 0.0),
    ]


@pytest.mark.parametrize("later_s", [10.0, 5000.0], ids=["while it restarts", "later"])
def test_the_loss_of_idle_workers_is_no_restart(later_s):
    (alone,) = compare((Restart,), WORLD, deaths((1e4, (5,))))
    (played,) = compare(
        (Restart,), WORLD, deaths((1e4, (5,)), (1e4 + later_s, (7,)), (1e4 + 2 * later_s, (6,)))
    )
    assert (played.restarts, played.downtime_s) == (alone.restarts, alone.downtime_s) == (1, 300.0)
    assert played.tokens_per_s == pytest.approx(alone.tokens_per_s)


@pytest.mark.parametrize(
    "system",
    [
        Odyssey,
        partial(Odyssey, OdysseyConfig(layout="auto")),
        Chameleon,
        ReCycle,
        Oobleck,
        Restart,
        *(partial(one, ours=True) for one in (Chameleon, ReCycle, Oobleck)),
    ],
)
def test_every_system_trains_on_and_none_faster_than_its_workers(system):
    """Down to half, with no more tokens than the work allows, and no fewer than one pipeline of Megatron's makes."""
    changes = tuple(ClusterChange(t_s=1e4 * (i + 1), died=(dead,)) for i, dead in enumerate((5, 0, 3, 6)))
    trace = FailureTrace(name="half", changes=changes, duration_s=5e4, mtbf_s=1e4)
    (played,) = compare((system,), WORLD, trace)
    rates = [rate for _, rate, _ in played.history if rate]
    assert [since for since, _, _ in played.history if not since % 1e4] == [0.0, 1e4, 2e4, 3e4, 4e4]
    for alive, rate in zip((8, 7, 6, 5, 4), rates, strict=True):
        assert 1000 / (19 * 6.0) <= rate * (1 + 1e-9)
        assert rate <= 1000 * alive / WORK_S
    mean = sum(rates) / len(rates)
    assert mean - played.downtime_s * max(rates) / 5e4 <= played.tokens_per_s <= mean


def test_odyssey_is_never_below_one_policy_and_uses_repaired_workers():
    trace = with_repairs(WORLD.workers, mtbf_s=4000.0, repair_s=6000.0, duration_s=80_000.0, seed=5)
    systems = [partial(Odyssey, OdysseyConfig(policy=policy), policy) for policy in policies()]
    rates = {one.system: one.tokens_per_s for one in compare(systems, WORLD, trace)}
    assert rates["auto"] >= 0.999 * max(rates.values())
    back = (ClusterChange(t_s=10.0, died=(1,)), ClusterChange(t_s=9000.0, joined=(1,)))
    played = play(Odyssey(), WORLD, replace(trace, changes=back))
    healthy, broken, repaired = (rate for _, rate, _ in played.history if rate)
    assert broken < repaired
    assert repaired >= healthy


def test_no_two_systems_are_drawn_alike_and_none_trains_in_its_pauses(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.append(self))
    trace = deaths((1e4, (0, 1)))
    plot(trace, compare(SYSTEMS, WORLD, trace), str(tmp_path / "rates.png"))
    (axes,) = drawn[0].axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == len(SYSTEMS) > 10
    assert all(0.0 in line.get_ydata() for line in axes.lines)
    assert axes.get_legend() is None  # it is beside the lines, and hides none


def test_command(capsys, tmp_path):
    png = tmp_path / "rates.png"
    small = ["--cluster", "1x8", "--accelerator", "h200", "--model", "llama2-7b"]
    assert main_simulate([*small, "--interval-s", "600", "--losses", "2", "--png", str(png)]) == 0
    text = capsys.readouterr().out
    assert "one every 10 min, 2 changes" in text
    assert "recycle" in text
    assert png.stat().st_size > 1000
    trace = tmp_path / "trace"
    trace.write_text("100 kill 1\n900 join 1\n2000 end\n")
    assert main_simulate([*small, "--trace", str(trace), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert len(got["traces"][0]["systems"]) == len(SYSTEMS)
    with pytest.raises(ConfigError, match="missing"):
        main_simulate([*small, "--trace", str(tmp_path / "missing")])
