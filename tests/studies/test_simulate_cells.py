"""``odyssey simulate`` of jobs whose workers are cells of several GPUs."""

from __future__ import annotations

import json
import re
import time

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.studies import progress
from odyssey_megatron.studies.traceplay import main_simulate
from odyssey_megatron.studies.whatif import main_plan

TP4 = (
    "--model llama2-7b --cluster 4x8 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
    "--num-microbatches 6"
).split()
"""Eight cells of four GPUs, four pipelines of two."""
TOKENS = 24 * 4096
"""Of a step: six sequences for each pipeline."""
BROKEN, REPAIRED, END_S = 1000.0, 20_000.0, 40_000.0


@pytest.fixture
def play(capsys, tmp_path):
    """Systems by name, of one GPU that is lost and repaired, or of another trace."""

    def played(*flags: str, trace: str = f"{BROKEN} kill 0:1\n{REPAIRED} join 0:1\n{END_S} end"):
        path = tmp_path / "trace"
        path.write_text(trace)
        assert main_simulate([*TP4, "--trace", str(path), "--json", *flags]) == 0
        got = json.loads(capsys.readouterr().out)
        return {one["system"]: one for one in got["traces"][0]["systems"]}, " ".join(got["notes"])

    return played


def changes(played) -> list[tuple[float, float]]:
    """(since, tokens per second once it trains again), of the start and of each change, after which it stands still."""
    history = played["history"]
    assert not any(rate for _, rate, _ in history[1::2])
    return [
        (still[0], trains[1])
        for still, trains in zip([history[0], *history[1::2]], history[::2], strict=True)
    ]


def test_what_is_left_of_a_cell_trains_until_it_is_whole_again(play, capsys):
    found, notes = play("--odyssey-respawn", "1", "--start-s", "50")
    times, rates = zip(*changes(found["odyssey"]), strict=True)
    step_s = TOKENS / rates[0]
    assert times == pytest.approx(
        (0, BROKEN, BROKEN + 100 + 4 * step_s, REPAIRED, REPAIRED + 50 + 4 * step_s)
    )
    assert rates[1] < rates[2]
    assert rates[3] == pytest.approx(rates[1], rel=0.02)
    assert rates[4] == rates[0]
    whole = found["odyssey, shrink off"]
    assert (found["odyssey"]["smaller"], whole["smaller"]) == (1, 0)
    assert whole["tokens_per_s"] < found["odyssey"]["tokens_per_s"]
    assert found["odyssey"]["tokens_per_s"] < max(rates)
    assert "goes on with 2, 1 GPUs, 2 start(s) of 50 s" in notes
    # The step is that of odyssey plan.
    asked = [
        "--kill",
        "0:1",
        "--odyssey-respawn",
        "1",
        "--mtbf-s",
        "40000",
        "--horizon-s",
        "160000",
        "--json",
    ]
    assert main_plan([*TP4, *asked]) == 0
    plan = json.loads(capsys.readouterr().out)["smaller"]
    assert plan["sizes"] == {"0": 2}
    assert TOKENS / plan["plan"]["step_s"] == pytest.approx(rates[2])


def test_flags_ask_for_it_and_against_it(play):
    without, notes = play()
    assert without["odyssey"]["smaller"] == 1
    assert without["odyssey, shrink off"]["smaller"] == 0
    assert "1 start(s) of 100 s" in notes
    for respawn in "01":
        off, notes = play("--odyssey-respawn", respawn, "--odyssey-shrink", "off")
        assert "stands by: --odyssey-shrink off" in notes
        assert not any(one["smaller"] for name, one in off.items() if name != "resihp")
        assert "odyssey, shrink off" not in off
    more, _ = play("--odyssey-respawn", "3")
    assert changes(more["odyssey"])[2][0] > BROKEN + 400


def test_why_cells_stand_by_is_said_as_by_plan(play):
    _, notes = play("--odyssey-respawn", "1", "--hidden-dropout", "0.1")
    assert "stands by: its forward draws numbers (dropout)" in notes
    _, notes = play("--odyssey-respawn", "1", "--cluster", "16x2")
    assert "stands by: cells of ranks on several nodes do not go on with fewer" in notes


def test_a_node_takes_its_cells(play):
    found, _ = play("--odyssey-respawn", "1", trace="1000 kill 1:*\n20000 join 1:*\n40000 end")
    assert found["odyssey"]["smaller"] == found["resihp"]["smaller"] == 0
    assert [since for since, _ in changes(found["odyssey"])] == [0, 1000, 20000]


def test_other_systems_lose_the_cell_and_resihp_half_of_it(play):
    """Lost GPUs of a cell that is broken already change nothing for cells that leave as one."""
    trace = "1000 kill 0:0\n2000 kill 0:2\n3000 kill 0:1\n20000 join 0:*\n40000 end"
    found, _ = play("--odyssey-shrink", "off", trace=trace)
    for name in ("recycle", "oobleck", "bamboo", "chameleon", "restart", "odyssey"):
        assert [since for since, _ in changes(found[name])] == [0, 1000, 20000], name
    times, rates = zip(*changes(found["resihp"]), strict=True)
    assert times == (0, 1000, 3000, 20000)  # 4, 2, 1, and 4 GPUs again
    assert rates[0] == rates[3] >= rates[1] >= rates[2] >= rates[0] * 6 / 8
    assert found["resihp"]["smaller"] == 2


def test_the_table_counts_smaller_cells(capsys):
    flags = ["--interval-s", "3600", "--losses", "1"]
    assert main_simulate([*TP4, *flags, "--odyssey-respawn", "1"]) == 0
    text = capsys.readouterr().out
    assert "note: a worker is a cell of 4 GPUs, and a lost GPU breaks its cell" in text
    assert "smaller cells\n" in text
    assert main_simulate(["--cluster", "1x8", "--accelerator", "h200", *flags]) == 0
    text = capsys.readouterr().out
    assert "smaller" not in text
    assert "resihp" not in text


def test_deaths_are_half_as_many_as_there_are_cells(capsys):
    assert main_simulate([*TP4, "--interval-s", "3600", "--json"]) == 0
    trace = json.loads(capsys.readouterr().out)["traces"][0]["trace"]
    assert len(trace["changes"]) == 4
    assert max(one["died"][0] for one in trace["changes"]) > 7, "they are GPUs"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--node-share", "0.5"], "--node-share is for --mtbf-s"),
        (["--node-share", "2", "--mtbf-s", "9000"], "found 2"),
        (["--start-s", "-1"], "found -1"),
        (["--losses", "32"], "must leave one of 32 GPUs"),
        (["--odyssey-shrink", "on"], "--odyssey-shrink 'on' is unknown"),
        (["--fp8-format", "hybrid"], "--model llama2-7b is instead of a launch line, and"),
    ],
)
def test_bad_input(flags, message):
    with pytest.raises(ConfigError, match=message):
        main_simulate([*TP4, *flags])


def test_what_takes_long_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.02)
    assert main_simulate(["--cluster", "1x8", "--accelerator", "h200", "--interval-s", "3600"]) == 0
    said = capsys.readouterr()
    assert re.match(r"(odyssey simulate: \d+ s, [a-z, ]+: \d+% of the trace\n)+$", said.err)
    assert "% of the trace" not in said.out
    assert main_plan(["--cluster", "1x8", "--width", "0"]) == 0
    assert re.match(r"(odyssey plan: \d+ s, [a-z0-9' :]+\n)+$", capsys.readouterr().err)


def test_what_is_short_says_nothing(capsys):
    with progress.Progress("odyssey plan") as one:
        one.say("much")
        time.sleep(0.01)
    assert not capsys.readouterr().err
