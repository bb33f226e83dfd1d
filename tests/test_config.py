from __future__ import annotations

import argparse
import re
from dataclasses import fields

import pytest

from odyssey_megatron import errors
from odyssey_megatron.config import (
    OdysseyConfig,
    add_arguments,
    config_from,
    config_from_argv,
    flag_of,
    strange_variables,
)
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.faults import (
    INJECTION_POINTS,
    Injection,
    Slowdown,
    SlowLink,
    check_can_strike,
    parse_injections,
)

FROZEN = {
    "mode": "off",
    "policy": "auto",
    "device": "cuda",
    "float64": "off",
    "run_dir": "odyssey-run",
    "bind": "",
    "job_host": "",
    "inject": "",
    "accept": "",
    "strict": "off",
    "layout": "megatron",
    "redundancy": "off",
    "redundancy_level": 1,
    "spare_state": "device",
    "respawn": 0,
    "shrink": "auto",
    "rebalance": "off",
    "sequence_balance": "off",
    "time_links": "off",
    "page_port": 0,
    "metrics_port": 0,
    "page_bind": "127.0.0.1",
    "interrupted_step": "resume",
    "on_sigterm": "auto",
    "memory_headroom_percent": 10,
    "slower_for_memory_percent": 0.2,
    "profile": "",
    "backend": "auto",
    "profile_steps": 5,
    "trace_steps": 2,
    "horizon_s": 3600.0,
    "mtbf_s": 21600.0,
    "restart_s": 0.0,
    "heartbeat_s": 0.05,
    "hang_s": 5.0,
    "node_lease_s": 3.0,
    "build_timeout_s": 5.0,
    "op_timeout_s": 60.0,
    "recovery_timeout_s": 30.0,
    "store_timeout_s": 120.0,
}
"""Launch lines depend on these: a flag may be added, never renamed, and a default not changed silently."""


def test_flags_and_defaults_are_frozen():
    assert {one.name: one.default for one in fields(OdysseyConfig)} == FROZEN


def test_every_number_of_seconds_says_so_in_its_name_and_help():
    for one in fields(OdysseyConfig):
        if type(one.default) is float:
            unit = "percent" if one.name.endswith("_percent") else "seconds"
            assert one.name.endswith("_percent" if unit == "percent" else "_s")
            assert unit in one.metadata["help"]


def test_the_parser_offers_every_flag_with_help():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = parser.format_help()
    assert all(flag_of(one) in text for one in fields(OdysseyConfig))
    assert config_from(parser.parse_args([]), {}) == OdysseyConfig()


def test_a_flag_beats_the_variable_which_beats_the_default():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    environ = {"ODYSSEY_POLICY": "reroute", "ODYSSEY_HANG_S": "7.5", "ODYSSEY_PROFILE_STEPS": "9"}
    config = config_from(parser.parse_args(["--odyssey-policy", "replan"]), environ)
    assert (config.policy, config.hang_s, config.profile_steps) == ("replan", 7.5, 9)


@pytest.mark.parametrize(
    ("argv", "environ", "mode"),
    [
        ([], {}, "off"),
        (["--odyssey"], {}, "recover"),
        (["--odyssey", "observe"], {"ODYSSEY": "off"}, "observe"),
        ([], {"ODYSSEY": "recover"}, "recover"),
    ],
)
def test_the_mode_is_the_flag_itself(argv, environ, mode):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert config_from(parser.parse_args(argv), environ).mode == mode


def test_settings_are_found_among_another_program_s_flags(monkeypatch):
    monkeypatch.delenv("ODYSSEY_DEVICE", raising=False)
    argv = ["--num-layers", "8", "--odyssey-device", "cpu", "--lr=3e-3", "--odyssey-hang-s=2", "-x"]
    config = config_from_argv(argv)
    assert (config.device, config.hang_s) == ("cpu", 2.0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--odyssey-policy", "pray"], "'pray' is unknown; use one of auto, reroute, replan"),
        (["--odyssey-polcy", "auto"], "unknown flag --odyssey-polcy; is --odyssey-policy meant?"),
        (["--odyssey-colour", "red"], "unknown flag --odyssey-colour; known: --odyssey, --odyssey-policy"),
        (["--odyssey-hang-s", "soon"], "--odyssey-hang-s"),
        (
            ["--odyssey-hang-s", "-1"],
            "--odyssey-hang-s: a number from 0.001 to 1,000,000 is expected, found -1",
        ),
        (
            ["--odyssey-heartbeat-s", "9"],
            "--odyssey-heartbeat-s: a number from 0.001 to 1 is expected, found 9",
        ),
        (
            ["--odyssey-heartbeat-s", "0.9", "--odyssey-hang-s", "0.8"],
            "--odyssey-heartbeat-s (0.9 s) must be below --odyssey-hang-s",
        ),
        (
            ["--odyssey-node-lease-s", "0.2"],
            "--odyssey-node-lease-s: a number from 0.5 to 1,000,000 is expected, found 0.2",
        ),
        (["--odyssey-hang-s", "61"], "--odyssey-hang-s (61.0 s) must be below --odyssey-op-timeout-s"),
        (["--odyssey-inject", "rank=1"], "at, step is missing"),
        (
            ["--odyssey-redundancy", "compute", "--odyssey-interrupted-step", "redo"],
            "which --odyssey-interrupted-step redo gives up",
        ),
    ],
)
def test_bad_input_is_one_paragraph_that_names_the_flag(argv, message):
    with pytest.raises(ConfigError) as caught:
        config_from_argv(argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_variable_is_named():
    with pytest.raises(
        ConfigError,
        match="variable ODYSSEY_HANG_S: a number from 0.001 to 1,000,000 is expected, found 'soon'",
    ):
        config_from(argparse.Namespace(), {"ODYSSEY_HANG_S": "soon"})


def test_no_variable_of_its_own_is_unknown(checkout):
    named = set[str]()
    for path in (checkout / "odyssey_megatron").rglob("*.py"):
        named |= set(re.findall(r'"(ODYSSEY_[A-Z_]+)"', path.read_text()))
    assert "ODYSSEY_SLOT" in named
    assert strange_variables(dict.fromkeys(named, "")) == {}


def test_injections_are_parsed():
    text = "rank=5,step=7,at=backward; rank=0, step=9, at=reduce, signal=STOP, microbatch=3, generation=2;"
    assert parse_injections(text) == (
        Injection(rank=5, step=7, at="backward"),
        Injection(rank=0, step=9, at="reduce", signal="STOP", microbatch=3, generation=2),
    )
    assert parse_injections("rank=5,step=20,slow=2.5,until=60; rank=1, step=0, slow=3, incarnation=1") == (
        Slowdown(rank=5, step=20, slow=2.5, until=60),
        Slowdown(rank=1, step=0, slow=3.0, incarnation=1),
    )
    assert parse_injections("link=3>5,step=20,slow=4,until=60;link= 0 > 1 ,step=0,slow=2") == (
        SlowLink(link="3>5", step=20, slow=4.0, until=60),
        SlowLink(link="0 > 1", step=0, slow=2.0),
    )
    assert parse_injections("") == ()
    for point in INJECTION_POINTS:
        assert parse_injections(f"rank=0,step=0,at={point}")[0].at == point


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=5,step=7", "at is missing"),
        ("rank=5,step=7,at=lunch", "at=lunch is unknown; use one of forward"),
        ("rank=5,step=7,at=forward,signal=HUP", "signal=HUP is unknown; use one of KILL, STOP"),
        ("rank=five,step=7,at=forward", "rank: a whole number of 0 or more is expected, found 'five'"),
        ("rank=5,rank=6,step=7,at=forward", "cannot read 'rank=6'"),
        ("rank=5,step=7,at=forward,when=now", "cannot read 'when=now'"),
        ("5:7:forward", "cannot read '5:7:forward'"),
        ("rank=5,slow=2", "step is missing"),
        ("rank=5,step=7,slow=0.5", "slow: a number from 1 to 1,000 is expected, found 0.5"),
        ("rank=5,step=7,slow=2,until=7", "until=7 is not behind step=7"),
        (
            "rank=5,step=7,slow=2,at=forward",
            "cannot read 'at=forward'. Write 'rank=5,step=20,slow=2.0,until=60'",
        ),
        ("link=3,step=7,slow=2", "link: two ranks as in '3>5' are expected, found '3'"),
        ("link=3>3,step=7,slow=2", "link: two ranks as in '3>5' are expected"),
        ("link=a>3,step=7,slow=2", "link: two ranks as in '3>5' are expected"),
        ("link=3>5,slow=2", "step is missing"),
        ("link=3>5,step=7,slow=2,rank=3", "Write 'link=3>5,step=20,slow=4,until=60'"),
        ("link=3>5,step=7,slow=2", "or the rate of the network"),
        ("rank=5,step=7,slow=2", "Use --odyssey-device cpu, or lower the clock of the GPU"),
    ],
)
def test_bad_injections_say_what_is_wrong(text, message):
    with pytest.raises(ConfigError, match="--odyssey-inject") as caught:
        OdysseyConfig(inject=text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cuts_state", "times_links", "message"),
    [
        ("rank=1,step=6,at=forward", False, False, "the job has 6 step(s), which count from 0"),
        ("rank=1,step=7,at=evaluate", False, False, "it comes to this in step 6 at the latest"),
        ("rank=1,step=6,slow=2", False, False, "it comes to this in step 5 at the latest"),
        ("link=0>1,step=6,slow=2", False, False, "it comes to this in step 5 at the latest"),
        ("rank=1,step=3,at=exchange", True, False, "Add --odyssey-time-links on"),
        ("rank=1,step=-1,at=param_gather", False, True, "Add --use-distributed-optimizer"),
        ("rank=1,step=5,at=forward;rank=2,step=-1,at=groups,generation=3", False, False, ""),
        ("rank=1,step=6,at=evaluate;rank=1,step=6,at=checkpoint;rank=1,step=6,at=agree", False, False, ""),
        ("rank=1,step=2,at=exchange;rank=1,step=5,at=param_gather", True, True, ""),
    ],
)
def test_faults_that_a_job_never_comes_to_are_refused(text, cuts_state, times_links, message):
    def check() -> None:
        check_can_strike(text, train_steps=6, cuts_state=cuts_state, times_links=times_links)

    if not message:
        return check()
    with pytest.raises(ConfigError, match="would never strike") as caught:
        check()
    assert f"--odyssey-inject {text!r}" in str(caught.value)
    assert message in str(caught.value)


def test_who_only_looks_on_injects_nothing():
    with pytest.raises(ConfigError, match="observe injects no faults"):
        OdysseyConfig(mode="observe", inject="rank=1,step=2,at=backward")


@pytest.mark.parametrize(
    ("flags", "distributed", "idle"),
    [
        (["--odyssey-redundancy-level", "2"], False, ["--odyssey-redundancy-level"]),
        (["--odyssey-redundancy-level", "2"], True, []),
        (["--odyssey-redundancy-level", "2", "--odyssey-redundancy", "state"], False, []),
        (["--odyssey-spare-state", "host"], False, ["--odyssey-spare-state"]),
        (["--odyssey", "observe", "--odyssey-respawn", "3"], True, ["--odyssey-respawn"]),
        (["--odyssey", "--odyssey-respawn", "3"], False, []),
    ],
)
def test_what_changes_nothing_is_told(flags, distributed, idle):
    assert [flag for flag, _ in config_from_argv(flags).without_effect(distributed=distributed)] == idle


def test_exit_codes_tell_apart_what_has_happened():
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert len(codes) == len(set(codes)) >= 7
