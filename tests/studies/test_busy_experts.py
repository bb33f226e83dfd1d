"""Loads of experts that runs have measured count in plans for gangs like theirs."""

import json
import re
from dataclasses import replace

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.studies.presets import ACCELERATORS, MODELS
from odyssey_megatron.studies.traceplay import main_simulate
from odyssey_megatron.studies.whatif import main_plan

GANGS = (
    "--model qwen3-30b-a3b --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 --num-microbatches 16"
).split()
EVEN, BUSY = [[8, 1.1], [7, 1.3], [4, 2.0]], [[8, 1.25], [7, 2.5], [4, 3.5]]


def run_folder(tmp_path, name, *loads, experts=16):
    """A run that has told of these loads, one after the other."""
    folder = tmp_path / name
    profile = MODELS["qwen3-30b-a3b"].profile(ACCELERATORS["h100"], expert_parts=8)
    replace(profile, source="measured", samples=9).save(folder / "profile.json")
    journal = Journal(folder, source="coordinator")
    for one in loads:
        journal.event("expert_loads", loads=one, experts=experts)
    journal.close()
    return str(folder)


def planned(capsys, *flags):
    """(the step with what is left of the broken gang, what is said of experts)"""
    assert main_plan([*GANGS, "--kill", "0:3", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["smaller"]["plan"]["step_s"], [one for one in found["notes"] if "loaded" in one]


def test_what_is_left_of_a_gang_is_as_slow_as_a_run_says(capsys, tmp_path):
    """The last loads of the last run that fits count, whichever file of it is named."""
    other = run_folder(tmp_path, "other", BUSY, experts=8)
    run = run_folder(tmp_path, "run", EVEN, BUSY)
    presumed_s, (said,) = planned(capsys, "--profile", other)
    assert said == (
        "experts are taken to be evenly loaded: no run that is named has measured those of gangs of 8 ranks with 16 "
        "expert(s) each"
    )
    busy_s, (said,) = planned(capsys, "--profile", run)
    assert said == (
        f"experts are loaded as {run} has measured: the busiest rank of a gang of 8 gets 1.25 times the mean of "
        "tokens, 2.50 times in one of 7, 3.50 times in one of 4"
    )
    assert busy_s > presumed_s
    assert planned(capsys, "--profile", f"{run}/profile.json")[0] == busy_s


def test_runs_that_are_fitted_say_it_too(capsys, tmp_path):
    fits = [
        run_folder(tmp_path, "busy", BUSY),
        run_folder(tmp_path, "even", EVEN),
        run_folder(tmp_path, "none"),
    ]
    flags = [flag for run in fits for flag in ("--fit", run)]
    assert f"as {fits[1]} has measured" in planned(capsys, *flags)[1][0], "the last one that knows them"
    assert planned(capsys, *flags[:2])[0] > planned(capsys, *flags)[0]


def test_without_gangs_nothing_is_said(capsys):
    assert main_plan("--cluster 1x8 --pipeline-model-parallel-size 8 --width 0".split()) == 0
    assert "loaded" not in capsys.readouterr().out


def test_days_of_failures_are_played_with_them(capsys, tmp_path):
    flags = [*GANGS, "--interval-s", "3000", "--losses", "1", "--duration-s", "20000", "--json"]

    def tokens(run):
        assert main_simulate([*flags, "--profile", run]) == 0
        (trace,) = json.loads(capsys.readouterr().out)["traces"]
        return {one["system"]: one for one in trace["systems"]}

    even, busy = (tokens(run_folder(tmp_path, name, loads)) for name, loads in (("e", EVEN), ("b", BUSY)))
    assert even.keys() == busy.keys()
    assert even != busy


def test_a_journal_that_cannot_be_read_is_named(tmp_path):
    run = run_folder(tmp_path, "run", BUSY)
    newer = '{"schema_version":99,"event":"expert_loads"}\n'
    (tmp_path / "run" / "journal" / "newer.jsonl").write_text(newer)
    with pytest.raises(ConfigError, match=re.escape("newer.jsonl, line 1: it has schema_version 99")):
        main_plan([*GANGS, "--profile", run])
