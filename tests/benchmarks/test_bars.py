from __future__ import annotations

import json
import math

import pytest

from .bars import at_least, at_most, exactly, finish, kept, summarize, taken


def test_bars_come_last_and_a_missed_one_is_exit_code_1(capsys):
    bars = [at_most("detect_ms", 12.0, 50), at_least("restart_over_stall", 19.9, 20)]
    assert finish({"ranks": 8, "detect_ms": summarize([10.0, 12.0, 40.0])}, bars, as_json=True) == 1
    got = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(got)[-1] == "bars"
    assert got["bars"][0] == {"name": "detect_ms", "value": 12.0, "bar": "<= 50", "ok": True}
    assert got["bars"][1]["ok"] is False
    assert got["detect_ms"] == {"count": 3, "median": 12.0, "min": 10.0, "max": 40.0}


def test_all_cleared_is_0_and_nothing_measured_is_not(capsys):
    assert finish({}, [at_most("x", 1.0, 1.0)], as_json=False) == 0
    assert "ok     x = 1 (<= 1)" in capsys.readouterr().out
    assert finish({}, [at_most("x", math.nan, 1.0)], as_json=False) == 1
    assert finish({}, [], as_json=True) == 1


def test_what_was_not_measured_is_null(capsys):
    assert finish({"stall_s": summarize([])}, [at_most("x", math.nan, 1.0)], as_json=True) == 1
    got = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert got["stall_s"] == {"count": 0, "median": None, "min": None, "max": None}
    assert got["bars"][0]["value"] is None


def test_what_was_not_measured_is_no_number():
    assert taken(0.0, "a time") == 0.0
    for value in (None, math.nan):
        with pytest.raises(RuntimeError, match="a time was not measured"):
            taken(value, "a time")


def test_a_job_that_a_signal_ended_has_not_ended_well():
    assert exactly("exit code", 0, 0).ok
    assert not exactly("exit code", -9, 0).ok


def test_what_is_left_is_beside_what_is_proved_where_that_is_less():
    assert kept("one dead", 100.0, 105.0, 101.0, 31 / 32, 1.02).bar == ">= 0.954219"
    assert kept("one dead", 100.0, 107.0, 105.0, 31 / 32, 1.02).ok, "nobody could keep 0.954"
    assert not kept("one dead", 100.0, 108.0, 105.0, 31 / 32, 1.02).ok
