"""Jobs under another launcher, whose processes stand in for ranks."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import HashStore

from odyssey_megatron.launch import shim
from odyssey_megatron.launch.shim import of_this_round
from tests.launch.jobserver import CHECKOUT, ENVIRONMENT, events, wait_for
from tests.launch.test_survival import is_running
from tests.surroundings.trees import tree

ENTERS = """
import os, pathlib, runpy, sys
from odyssey_megatron.launch import shim
if shim.is_needed():
    os.environ["ATTEMPT"] = os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(__file__).with_name(f"{os.environ['ATTEMPT']}-{os.environ['RANK']}").write_text(str(os.getpid()))
    shim.become()
sys.argv += FIRST if os.environ["ATTEMPT"] == "0" else []
runpy.run_path(TOY, run_name="__main__")
"""
"""What a patched Megatron-LM does first, and the toy in its place, with arguments of its own in the first attempt."""


def start(tmp_path, *argv, first=(), closing="") -> subprocess.Popen[bytes]:
    """A job of two ranks under torchrun."""
    script = tmp_path / "patched.py"
    toy = repr(str(CHECKOUT / "tests/launch/toy.py"))
    script.write_text(ENTERS.replace("TOY", toy).replace("FIRST", repr(list(first))))
    command = ["sh", "-c", f'exec "$@" {closing}', "sh"]
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *argv]
    command += [str(script), "--pipeline", "1", "--odyssey-device", "cpu"]
    command += ["--odyssey-run-dir", str(tmp_path / "run")]
    # What torchrun leaves behind when it is killed is no business of other tests.
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(CHECKOUT), "TMPDIR": str(tmp_path)}
    with (tmp_path / "log").open("w") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_job_ends_with_its_launcher(tmp_path):
    """A stand-in that outlives it would train on, unseen, beside the job that is started next."""
    run = tmp_path / "run"
    launcher = start(tmp_path, first=["--hold", str(tmp_path / "go")])
    pids: list[int] = []
    try:
        wait_for(lambda: len(events(run, "recovered")) == 2, 90, "all ranks in their groups")
        pids = tree(launcher.pid)
        assert {one["pid"] for one in events(run, "rank_started")} < set(pids)
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not any(map(is_running, pids)), 10, "the job ends")
    finally:
        kill([launcher.pid, *pids])


@pytest.mark.timeout(260)
@pytest.mark.parametrize("how", ["the job fails", "a stand-in is killed"])
def test_a_restart_by_torchrun_does_not_end_by_the_verdict_before(tmp_path, how):
    """torchrun's store, through which stand-ins hear the verdict, outlives its restarts."""
    go, killed = tmp_path / "go", how == "a stand-in is killed"
    first = ["--hold", str(go)] if killed else ["--exit-at", "all:3:7"]
    launcher = start(tmp_path, "--max-restarts", "1", first=first)
    try:
        if killed:
            wait_for((tmp_path / "go.waits").exists, 90, "the job trains")
            os.kill(int((tmp_path / "0-1").read_text()), signal.SIGKILL)
        wait_for(lambda: launcher.poll() is not None, 150, "torchrun ends")
        assert launcher.returncode == 0, (tmp_path / "log").read_text()
        assert (tmp_path / "1-0").exists(), "there was no restart"
        assert len(events(tmp_path / "run", "step_committed")) == 2, "both ranks have trained to the end"
    finally:
        kill([launcher.pid, *tree(launcher.pid)])


def test_a_job_under_torchrun_whose_standard_streams_are_closed(tmp_path):
    launcher = start(tmp_path, closing="0<&- 1>&- 2>&-")
    try:
        wait_for(lambda: launcher.poll() is not None, 90, "torchrun ends")
        assert launcher.returncode == 0
        assert len(events(tmp_path / "run", "step_committed")) == 2
    finally:
        kill([launcher.pid, *tree(launcher.pid)])


def meet(store, ranks) -> list[str]:
    """What these ranks of a round find in their part of the store, where each rank puts what all are to read."""
    parts = {}

    def come(rank):
        parts[rank] = of_this_round(store, rank, len(ranks), 20, single_node=False)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parts[0].set("odyssey/port", secrets.token_hex(8))
    return [parts[rank].get("odyssey/port").decode() for rank in ranks]


def test_ranks_of_a_round_meet_whatever_the_rounds_before_have_left(monkeypatch):
    """Others may look before rank 0 has come, or have died after they had asked for the name."""
    monkeypatch.setattr(shim, "_AFTER_RANK_0_S", 0.0)
    store = HashStore()
    before = meet(store, range(4))
    for rank in (2, 0):
        with pytest.raises(TimeoutError):
            of_this_round(store, rank, 4, 1, single_node=False)
    for ranks in (range(4), range(3, -1, -1)):
        here = meet(store, ranks)
        assert len({*here}) == 1
        assert not {*here} & {*before}
        before += here


def test_ranks_of_which_some_are_missing_say_who_waits_for_whom(monkeypatch):
    """Rank 0 is the first to give up: with the first the launcher ends its node's, and rank 0 alone knows the names."""
    monkeypatch.setattr(shim, "_AFTER_RANK_0_S", 1.0)
    store, said = HashStore(), {}

    def come(rank, limit_s):
        with pytest.raises(TimeoutError) as error:
            of_this_round(store, rank, 5, limit_s, single_node=False)
        said[rank] = str(error.value)

    come(3, 0.2)
    assert "rank 3 has waited for 0 s for rank 0, which the launcher has not started" in said.pop(3)
    threads = [threading.Thread(target=come, args=(rank, 2.0)) for rank in (2, 3, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.5)  # rank 0 comes last
    for thread in threads:
        thread.join()
    assert next(iter(said)) == 0
    assert "rank 0 has waited for 2 s for rank(s) [1, 4], which the launcher has not started" in said[0]
    for rank in (2, 3):
        assert " s for an answer of rank 0: it waits for other ranks" in said[rank]
    assert all("One possible cause: with --rdzv-backend static" in text for text in said.values())


def test_ranks_meet_though_one_comes_when_the_first_would_have_given_up(monkeypatch):
    """Each other rank's time begins when rank 0 has come."""
    monkeypatch.setattr(shim, "_AFTER_RANK_0_S", 1.0)
    store, here = HashStore(), []

    def come(rank):
        of_this_round(store, rank, 3, 3.0, single_node=False)
        here.append(rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 0, 2)]
    for thread in threads:
        thread.start()
        time.sleep(2.0)
    for thread in threads:
        thread.join()
    assert sorted(here) == [0, 1, 2]


def test_a_rank_that_comes_at_the_last_moment_is_not_missed(monkeypatch):
    store, get = HashStore(), shim._get

    def last_moment(store, key, ends_s):
        if ends_s == float("inf"):
            return get(store, key, ends_s)
        store.set(key, "late")
        raise TimeoutError(key)

    monkeypatch.setattr(shim, "_get", last_moment)
    of_this_round(store, 0, 2, 20, single_node=False)
    assert store.check(["odyssey/round/late"])


def test_ranks_of_a_single_node_come_however_late_and_are_named_meanwhile(monkeypatch, capsys):
    """Its launcher starts all of them, or ends all: nobody has to be waited for in vain."""
    monkeypatch.setattr(shim, "_LOOK_EVERY_S", 0.1)
    store, here = HashStore(), []

    def come(rank):
        here.append(of_this_round(store, rank, 3, 1.0, single_node=True))

    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in (1, 0, 2)]
    said = []
    for thread in threads:
        thread.start()
        thread.join(2.5 if thread is not threads[-1] else 20.0)
        said.append(capsys.readouterr().err)
    for thread in threads:
        thread.join(20.0)
    assert len(here) == 3
    before, alone, _ = said
    assert "rank 1 has waited for 1 s for rank 0, which the launcher has not started" in before
    assert "rank 0 has waited for 1 s for rank(s) [2], which the launcher has not started" in alone
    assert [text.count("\n") for text in said] == [1, 1, 0]
    assert "It goes on waiting" in before
    assert "static" not in before + alone
