"""Whole jobs that are shot at: real processes, real signals, real gloo."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.launch.jobserver import CHECKOUT, Job, events, pid_of, wait_for

pytestmark = pytest.mark.usefixtures("server")


def committed(tmp_path: Path) -> dict[int, int]:
    """Steps at the end, by rank that got there."""
    return {event["rank"]: event["step"] for event in events(tmp_path / "run", "step_committed")}


def check(job: Job, tmp_path: Path, *, steps: int, survivors: set[int]) -> None:
    assert job.wait(40) == 0, job.log()
    assert committed(tmp_path) == dict.fromkeys(survivors, steps), job.log()


def decided(tmp_path: Path) -> list[list[int]]:
    """The dead of each decision after the first."""
    return [event["dead"] for event in events(tmp_path / "run", "decision")][1:]


def test_an_undisturbed_job_has_one_generation(toy, tmp_path):
    check(toy(4, "--steps", 10), tmp_path, steps=10, survivors={0, 1, 2, 3})
    assert decided(tmp_path) == []
    assert {e["target"] for e in events(tmp_path / "run", "rank_started")} == {0, 1, 2, 3}
    assert (tmp_path / "run" / "profile.json").exists()


def test_a_job_is_launched_when_its_command_begins(server, tmp_path):
    """What the same process has done before, such as to copy data, is no part of it."""
    argv = ["--nproc-per-node", "2", str(CHECKOUT / "tests/launch/toy.py"), "--steps", "3"]
    argv += ["--odyssey-device", "cpu", "--odyssey-run-dir", str(tmp_path / "run")]
    script = tmp_path / "staging.py"
    script.write_text(
        "import pathlib, sys, time\nfrom odyssey_megatron.cli import main\ntime.sleep(0.2)\n"
        f"pathlib.Path({str(tmp_path / 'staged')!r}).write_text(str(time.monotonic()))\n"
        f"sys.exit(main(['run', *{argv!r}]))\n"
    )
    job = server.script([str(script)], log=tmp_path / "log")
    assert job.wait(60) == 0, job.log()
    (began,) = events(tmp_path / "run", "job_started")
    assert float((tmp_path / "staged").read_text()) <= began["launched_s"] < began["t_s"]


@pytest.mark.parametrize(
    ("inject", "dead"),
    [
        ("rank=0,step=5,at=forward", [[0]]),
        ("rank=3,step=0,at=forward", [[3]]),
        ("rank=7,step=5,at=backward;rank=0,step=9,at=reduce;rank=4,step=9,at=forward", None),
        ("rank=2,step=5,at=forward;rank=6,step=5,at=groups,generation=2", [[2], [6]]),
        ("rank=5,step=29,at=reduce", [[5]]),
    ],
    ids=["rank 0", "first step", "several in a row", "while recovering", "last step"],
)
def test_kills(toy, tmp_path, inject, dead):
    job = toy(8, "--steps", 30, "--odyssey-inject", inject)
    killed = {int(one.split(",")[0].split("=")[1]) for one in inject.split(";")}
    check(job, tmp_path, steps=30, survivors=set(range(8)) - killed)
    if dead is not None:
        assert decided(tmp_path) == dead


def test_faults_that_did_not_strike_are_named_at_the_end(toy, tmp_path):
    """Ranks 1 and 2 did not live to see their second ones, and no layer moved."""
    struck = "rank=1,step=3,at=forward;rank=2,step=5,at=forward"
    left = "rank=1,step=9,at=forward; rank=2,step=7,at=reduce; rank=0,step=-1,at=transfer"
    job = toy(4, "--steps", 12, "--odyssey-inject", f"{struck};{left}")
    check(job, tmp_path, steps=12, survivors={0, 3})
    told = [line for line in job.log().splitlines() if "no record that" in line]
    assert told == [
        "[odyssey] --odyssey-inject: the journal has no record that 3 fault(s) struck, so this job does not show that "
        f"it survives them: {left}"
    ]


def killed_anew(run: Path, rank: int) -> None:
    """SIGKILL to the newest process of ``rank``; returns when there is another one."""
    pids = [e["pid"] for e in events(run, "rank_started") if e["target"] == rank]
    os.kill(pids[-1], signal.SIGKILL)
    wait_for(lambda: started(run).count(rank) > len(pids), 20, f"rank {rank} is started anew")


def started(run: Path) -> list[int]:
    return [event["target"] for event in events(run, "rank_started")]


@pytest.mark.parametrize("respawn", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_ranks_that_are_killed_before_they_have_spoken(toy, tmp_path, respawn):
    late = ("--late", tmp_path / "speak", "--late-rank", 0)
    job = toy(4, "--steps", 20, *late, "--odyssey-respawn", respawn)
    wait_for(lambda: len(started(tmp_path / "run")) == 4, 20, "all ranks are started")
    time.sleep(1.0)  # by now the others have joined
    for rank in (0, 3, 0):
        killed_anew(tmp_path / "run", rank)
    (tmp_path / "speak").touch()
    check(job, tmp_path, steps=20, survivors={0, 1, 2, 3})
    assert decided(tmp_path) == []
    assert (
        "rank 0 was ended by signal 9 before the job began: it is started anew (2 of at most 3" in job.log()
    )


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_rank_that_is_killed_while_it_waits_for_others_to_speak(toy, tmp_path, rank):
    job = toy(4, "--steps", 20, "--late", tmp_path / "speak", "--late-rank", 3)
    wait_for(lambda: len(started(tmp_path / "run")) == 4, 20, "all ranks are started")
    time.sleep(0.5)  # by now it has posted what it trains
    killed_anew(tmp_path / "run", rank)
    (tmp_path / "speak").touch()
    check(job, tmp_path, steps=20, survivors={0, 1, 2, 3})
    assert decided(tmp_path) == []


@pytest.mark.matrix
def test_a_rank_that_is_killed_each_time_it_is_started(toy, tmp_path):
    job = toy(2, "--pipeline", 1, "--steps", 20, "--late", tmp_path / "speak", "--late-rank", 1)
    wait_for(lambda: len(started(tmp_path / "run")) == 2, 20, "all ranks are started")
    time.sleep(1.0)  # by now the other one has joined
    for _ in range(3):
        killed_anew(tmp_path / "run", 1)
    os.kill([e["pid"] for e in events(tmp_path / "run", "rank_started")][-1], signal.SIGKILL)
    assert job.wait(20) == 1, job.log()
    assert "rank 1 ended with exit code -9 before training started" in job.log()


def test_a_rank_of_a_script_that_does_not_know_odyssey_is_not_started_anew(server, tmp_path):
    """The others have met it by ways of their own, and would wait for it without end."""
    script, run = tmp_path / "plain.py", tmp_path / "run"
    script.write_text("import time\ntime.sleep(600)\n")
    where = ["--odyssey-device", "cpu", "--odyssey-run-dir", run]
    job = server.run(["--nproc-per-node", 2, script, *where], log=tmp_path / "log")
    wait_for(lambda: len(started(run)) == 2, 20, "all ranks are started")
    os.kill(pid_of(run, 0), signal.SIGKILL)
    assert job.wait(20) == 1, job.log()
    assert "rank 0 ended with exit code -9; the script never joined the job" in job.log()
    assert started(run) == [0, 1]


def test_two_at_once_make_one_decision_or_two(toy, tmp_path):
    job = toy(8, "--steps", 30, "--hold", tmp_path / "go")
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 8, 20, "all ranks in their groups")
    pids = [pid_of(tmp_path / "run", rank) for rank in (1, 6)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    check(job, tmp_path, steps=30, survivors={0, 2, 3, 4, 5, 7})
    assert sorted(rank for dead in decided(tmp_path) for rank in dead) == [1, 6]


@pytest.mark.parametrize("policy", ["reroute", "auto"])
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments(toy, tmp_path, policy, seed):
    """Also outside of any injection point: in the constructor of a group, in the store, between two messages."""
    generator = random.Random(f"{policy}{seed}")
    job = toy(8, "--steps", 80, "--step-s", 0.005, "--hold", tmp_path / "go", "--odyssey-policy", policy)
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 8, 20, "all ranks in their groups")
    victims = set(generator.sample(range(8), 3))
    for rank in victims:
        time.sleep(generator.choice([0.0, 0.01, 0.03, 0.1, 0.2]))
        os.kill(pid_of(tmp_path / "run", rank), signal.SIGKILL)
    (tmp_path / "go").touch()
    code = job.wait(40)
    may_lose = lost_layers(tmp_path, victims)
    assert not (policy == "reroute" and may_lose), "each layer has four holders, and keeps them"
    if code == 93 and may_lose:
        assert job.log().count("no holder is left of") == 1
    else:
        assert code == 0, job.log()
        assert committed(tmp_path) == dict.fromkeys(set(range(8)) - victims, 80), job.log()


def lost_layers(tmp_path: Path, victims: set[int]) -> set[tuple[int, int]]:
    """(generation, layer) without a holder but ``victims``."""
    return {
        (event["generation"], layer)
        for event in events(tmp_path / "run", "decision")
        for layer, holders in enumerate(event["layout"]["holders"])
        if set(holders) <= victims
    }


def test_a_hung_rank_is_fenced(toy, tmp_path):
    job = toy(4, "--steps", 20, "--odyssey-inject", "rank=2,step=5,at=forward,signal=STOP",
              "--odyssey-hang-s", 0.8)  # fmt: skip
    check(job, tmp_path, steps=20, survivors={0, 1, 3})
    assert "rank 2 has been silent for 0.8 s" in job.log()


def test_a_rank_whose_training_thread_is_stuck_is_fenced_though_it_beats(toy, tmp_path):
    job = toy(4, "--steps", 20, "--odyssey-inject", "rank=2,step=5,at=forward,signal=STUCK",
              "--odyssey-hang-s", 0.8, "--odyssey-op-timeout-s", 1, "--odyssey-build-timeout-s", 0.5,
              "--odyssey-recovery-timeout-s", 2)  # fmt: skip
    check(job, tmp_path, steps=20, survivors={0, 1, 3})
    assert "rank 2 has been silent for 0.8 s" in job.log()
    assert [e["cause"] for e in events(tmp_path / "run", "failure_detected")] == ["hang"]


def test_a_rank_that_is_stuck_is_noticed_by_ranks_whose_waits_have_no_limit(toy, tmp_path):
    """As those for a device have none: the other one waits in a loop."""
    held = tmp_path / "held"
    job = toy(2, "--pipeline", 1, "--steps", 20, "--odyssey-inject", "rank=1,step=15,at=forward,signal=STUCK",
              "--hold", held, "--odyssey-hang-s", 0.8, "--odyssey-op-timeout-s", 1,
              "--odyssey-build-timeout-s", 0.5, "--odyssey-recovery-timeout-s", 2)  # fmt: skip
    wait_for(lambda: events(tmp_path / "run", "failure_detected"), 20, "rank 1 to be fenced")
    held.write_text("")
    check(job, tmp_path, steps=20, survivors={0})
    assert "one instruction has taken longer than 1 s there" in job.log()


def test_ranks_that_were_not_forked_from_a_preloaded_process(toy, tmp_path):
    job = toy(
        2, "--pipeline", 1, "--steps", 20, "--odyssey-inject", "rank=0,step=5,at=forward", ODYSSEY_PRELOAD=""
    )
    check(job, tmp_path, steps=20, survivors={1})


def test_a_retry_gives_fresh_groups_to_the_same_members(toy, tmp_path):
    check(toy(4, "--steps", 20, "--retry-every", 8), tmp_path, steps=20, survivors={0, 1, 2, 3})
    assert decided(tmp_path) == [[], []], "after steps 8 and 16"


def test_the_last_holder_of_a_layer(toy, tmp_path):
    job = toy(4, "--pipeline", 4, "--steps", 20, "--odyssey-inject", "rank=2,step=5,at=backward")
    assert job.wait(30) == 93, job.log()
    assert job.log().count("no holder is left of ") == 1
    assert job.log().count(": losing it ends the job, exit code 93") == 1
    assert {e["rank"] for e in events(tmp_path / "run", "stopped")} == {0, 1, 3}
    assert [e["exit_code"] for e in events(tmp_path / "run", "job_finished")] == [93]


def test_all_ranks_are_killed(toy, tmp_path):
    """From outside, so that none is told of the others' deaths and ends before its own."""
    job = toy(4, "--steps", 1000)
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 20, "all ranks in their groups")
    pids = [pid_of(tmp_path / "run", rank) for rank in range(4)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert job.wait(30) == 93, job.log()
    codes = {code for e in events(tmp_path / "run", "failure_detected") for code in e["code"]}
    assert codes == {-9}, job.log()
    assert not any(map(is_running, pids))


def test_a_rank_that_fails_by_itself_is_a_death_like_any_other(toy, tmp_path):
    check(toy(4, "--steps", 20, "--exit-at", "2:5:7"), tmp_path, steps=20, survivors={0, 1, 3})


def test_all_ranks_fail_alike(toy):
    job = toy(4, "--steps", 20, "--exit-at", "all:5:7")
    assert job.wait(30) == 7, job.log()
    assert "ended with exit code 7" in job.log()
    assert "Traceback" not in job.log()


def test_the_agent_is_killed(toy, tmp_path):
    job = toy(4, "--steps", 1000)
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 20, "all ranks in their groups")
    pids = [pid_of(tmp_path / "run", rank) for rank in range(4)]
    job.kill()
    wait_for(lambda: not any(map(is_running, pids)), 5, "its ranks end with it")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_launcher_is_told_to_stop(toy, tmp_path, number):
    job = toy(4, "--steps", 1000)
    wait_for(lambda: len(events(tmp_path / "run", "recovered")) == 4, 20, "all ranks in their groups")
    pids = [pid_of(tmp_path / "run", rank) for rank in range(4)]
    os.kill(job.pid, number)
    assert job.wait(10) == 128 + number, job.log()
    assert not any(map(is_running, pids))
    (finished,) = events(tmp_path / "run", "job_finished")  # odyssey top would show a job that trains
    assert finished["exit_code"] == 128 + number
    assert finished["verdict"] == f"the job was ended by {number.name} to the agent of node 0."


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.slow
def test_twenty_recoveries_leave_nothing_behind(toy, tmp_path):
    """I10, over kills and fresh groups for the same members. Nothing waits for the limit of an operation."""
    stats = tmp_path / "stats"
    job = toy(8, "--steps", 130, "--step-s", 0.001, "--retry-every", 5, "--stats", stats,
              "--odyssey-op-timeout-s", 600, "--odyssey-hang-s", 3, "--odyssey-inject",
              "rank=3,step=20,at=forward;rank=5,step=40,at=reduce;rank=6,step=60,at=backward")  # fmt: skip
    check(job, tmp_path, steps=130, survivors={0, 1, 2, 4, 7})
    rows = [json.loads(line) for line in stats.read_text().splitlines()]
    first, last = rows[0], rows[-1]
    assert rows[-2]["generation"] > 20
    # The first row was taken with one generation's groups in use, the last one with none.
    assert last["threads"] <= first["threads"]
    assert last["fds"] <= first["fds"]
    assert last["sockets"] <= first["sockets"]
    assert last["groups"] <= first["groups"]
    # Memory settles after some ten generations (allocator, pages no longer shared with the parent).
    assert last["rss_kib"] - rows[len(rows) // 2]["rss_kib"] < 4 * 1024, rows


def test_an_error_that_all_ranks_have_is_no_failure_of_hardware(toy, tmp_path):
    """One traceback, and the end: no rank is taken for dead, no plan is made without it."""
    job = toy(4, "--steps", 20, "--raise-at", 5)
    assert job.wait(30) == 1, job.log()
    assert job.log().count("ValueError: nobody can do this step") == 1, job.log()
    assert job.log().count("several ranks failed with the same error, so no hardware has") == 1
    assert decided(tmp_path) == []


@pytest.mark.matrix
def test_what_fails_on_all_ranks_alike_in_every_generation_ends_the_job(toy, tmp_path):
    job = toy(4, "--steps", 20, "--part-at", 5)
    assert job.wait(60) == 1, job.log()
    assert job.log().count("20 generations in a row have come to nothing") == 1, job.log()
    assert decided(tmp_path) == [[]] * 21, "the first one was entered with five steps done"


def test_an_error_that_one_rank_has_is_survived(toy, tmp_path):
    check(toy(4, "--steps", 20, "--raise-at", 5, "--raise-rank", 2), tmp_path, steps=20, survivors={0, 1, 3})
