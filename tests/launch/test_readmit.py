"""``odyssey readmit``: which rank starts where, what is refused and why, and who is heard."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from odyssey_megatron import cli
from odyssey_megatron.cluster.places import Places
from odyssey_megatron.errors import EXIT_FENCED, EXIT_LEFT_OUT, ConfigError
from odyssey_megatron.launch.agent.ranks import Ranks
from odyssey_megatron.launch.agent.readmission import outlook, slot_of
from odyssey_megatron.launch.process.signals import Received
from odyssey_megatron.launch.wire import requests
from odyssey_megatron.launch.wire.requests import Request, Requests
from odyssey_megatron.metrics import journal
from odyssey_megatron.metrics.journal import Journal, read_journal
from tests.launch.jobserver import events, wait_for
from tests.launch.test_nodes import start
from tests.launch.test_respawn import EIGHT, Node
from tests.launch.test_survival import check

KILLED = -signal.SIGKILL
ENDED = "rank 3 has ended"


@pytest.mark.parametrize(
    ("gpu", "given_up", "expected"),
    [
        (None, {3: 3}, 3),
        (3, {3: 3, 5: 4}, 3),
        (None, {3: 2, 5: 3}, 5),  # on the GPU that another rank had at first
        (5, {3: 3, 5: 3}, 5),
        (None, {3: 3, 5: 3}, "rank 3 was given up on 2 GPUs of its node, 3, 5: say with --gpu"),
        (4, {3: 3}, "not given up on GPU 4. Given up on its node: rank 3 on GPU 3."),
        (None, {7: 6}, "rank 3 has ended, and was not given up. Given up on its node: rank 6 on GPU 7."),
        (None, {}, "Given up on its node: no rank."),
    ],
)
def test_a_rank_that_was_given_up_says_which_gpu_is_meant(gpu, given_up, expected):
    if isinstance(expected, int):
        assert slot_of(3, gpu, given_up, ENDED) == expected
    else:
        with pytest.raises(ConfigError) as refused:
            slot_of(3, gpu, given_up, ENDED)
        assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("rank", "cell", "before", "now", "lacks", "expected"),
    [
        (5, [5], 0, 1, 0, "It is filled while the others train, and joins them between two steps."),
        (
            5,
            [4, 5],
            1,
            2,
            0,
            "ranks 4 to 5, is whole: it leaves between two steps, and comes back with 2 ranks.",
        ),
        (5, [4, 5], 0, 2, 0, "ranks 4 to 5, is whole: it is filled"),
        (4, [4, 5], 0, 1, 1, "ranks 4 to 5, is a smaller one of 1 of 2 ranks: it is filled"),
        (6, [4, 5, 6, 7], 2, 3, 1, "trains with 2 ranks until it lacks none, and still lacks 1."),
        (6, [4, 5, 6, 7], 0, 2, 1, "It stands by: its cell, ranks 4 to 7, still lacks 1 of 4 ranks"),
    ],
)
def test_what_is_to_be_expected_is_said(rank, cell, before, now, lacks, expected):
    assert expected in outlook(rank, cell, before=before, now=now, lacks=lacks)


def test_a_gpu_that_works_again_goes_to_the_cell_that_lacks_the_fewest():
    places = Places(EIGHT)
    for rank in (1, 6, 7):
        places.lose(rank)
    assert places.given_up == {1: 1, 6: 6, 7: 7}
    assert places.readmit(7, 4) == (1, 0), "that of rank 7 would still lack one"
    assert places.slot(1) == 7
    assert places.given_up == {1: 1, 6: 6}
    assert [places.readmit(slot, 4) for slot in (6, 1)] == [(6, 0), (7, 0)]
    assert places.given_up == {}
    assert not places.broken(4)


def test_a_smaller_cell_that_lacks_nobody_any_more_is_whole():
    places = Places(EIGHT)
    places.lose(5)
    places.shrink(1, [4, 2, 1])
    assert places.size_left(1, 4) == 2
    assert places.readmit(5, 4) == (7, 2), "rank 5 has the GPU of rank 7, which is lost in its stead"
    assert places.size_left(1, 4) == 4
    assert not places.has_smaller


@settings(max_examples=200)
@given(
    sizes=st.sampled_from([(1,), (2, 1), (4, 2, 1), (4, 3, 2, 1), (4,), (8, 4, 2, 1)]),
    story=st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40),
)
def test_whatever_is_lost_and_comes_back_each_rank_has_a_gpu_in_the_end(sizes, story):
    places = Places(EIGHT)
    for dies, slot in story:
        if dies and (rank := places.rank_in(slot)) is not None:
            places.lose(rank)
        elif not dies and slot in places.given_up:
            rank, before = places.readmit(slot, sizes[0])
            assert before < sizes[0]
            assert places.rank_in(slot) == rank
        places.settle(sizes)
        free = {slot for slot in range(8) if places.rank_in(slot) is None}
        assert places.given_up.keys() == free
    for slot in [*places.given_up]:
        places.readmit(slot, sizes[0])
        places.settle(sizes)
    assert {places.slot(rank) for rank in range(8)} == set(range(8))
    assert not places.has_smaller
    assert not places.broken(sizes[0])


class Given:
    """An agent's part, of which ranks are lost at once."""

    def __init__(self, folder, *flags, **differs):
        self.node = Node(folder, *flags, **differs)

    def give_up(self, rank, slot, code=KILLED):
        before = len(self.named("given_up"))
        while len(self.named("given_up")) == before:
            self.node.ends(rank, slot, code)
            for one, there in self.node.due():
                self.node.respawn.begin(one, there, self.node.now_s)

    def readmit(self, rank, gpu=None):
        return self.node.respawn.readmit(rank, gpu, f"rank {rank} has ended", self.node.now_s)

    def named(self, name):
        return [one for one in read_journal(self.node.folder) if one["event"] == name]


@pytest.fixture
def whole(tmp_path):
    """Four cells of one rank."""
    return Given(tmp_path, tensor_model_parallel_size=1, pipeline_model_parallel_size=2)


@pytest.fixture
def cells(tmp_path):
    """Two cells of two."""
    return Given(tmp_path)


def test_its_starts_are_counted_anew(whole, capfd):
    whole.give_up(1, 1)
    assert "odyssey readmit" in capfd.readouterr().err
    assert whole.node.due() == []
    assert whole.readmit(1)[:2] == (1, 1)
    assert whole.node.due() == [(1, 1)]
    (again,) = whole.named("readmitted")
    assert (again["target"], again["slot"]) == (1, 1)
    whole.node.respawn.begin(1, 1, whole.node.now_s)
    whole.node.ends(1, 1, KILLED)
    assert whole.node.due() == [(1, 1)], "it has its start of --odyssey-respawn 1 again"


def test_numbers_that_were_wrong_are_forgotten(whole):
    whole.give_up(1, 1, EXIT_LEFT_OUT)
    whole.readmit(1)
    assert whole.node.due() == [(1, 1)]
    whole.node.respawn.begin(1, 1, whole.node.now_s)
    whole.node.ends(1, 1, EXIT_LEFT_OUT)
    assert whole.node.due() == [(1, 1)], "wrong once on this GPU"


def test_a_smaller_cell_grows(cells):
    cells.give_up(3, 3)
    assert cells.node.places == "1"
    found = cells.readmit(3)
    assert "its cell, ranks 2 to 3, is whole: it leaves between two steps" in found.says
    assert cells.node.places == "0"
    assert cells.node.due() == [(3, 3)]
    assert not cells.node.respawn._smaller_size(2), "it comes back as one of two"


def test_another_rank_starts_where_one_was_given_up_that_has_its_gpu_by_now(tmp_path):
    """Rank 2 plays where rank 3 was, and rank 3 then where rank 0 was: ranks 0 and 1 have no GPU."""
    cells = Given(tmp_path, cells=3)
    cells.give_up(2, 2)
    cells.give_up(1, 1)
    taken = [(one["target"], one["spare"]) for one in cells.named("place_taken")]
    assert taken == [(2, 3), (3, 0)]
    rank, slot, says = cells.readmit(2)
    assert (rank, slot) == (0, 2)
    assert "is a smaller one of 1 of 2 ranks" in says
    assert (0, 2) in cells.node.due()
    rank, slot, says = cells.readmit(1)
    assert (rank, slot) == (1, 1)
    assert "it leaves between two steps" in says


def test_a_cell_of_which_nobody_was_left_is_a_smaller_one_and_then_whole(cells):
    cells.give_up(3, 3)
    cells.give_up(2, 2)
    assert cells.node.places == "0"
    rank, slot, says = cells.readmit(3)
    assert (rank, slot) == (2, 3)
    assert "a smaller one of 1 of 2 ranks" in says
    assert cells.node.places == "1"
    assert cells.readmit(2)[:2] == (3, 2)
    assert cells.node.places == "0"


def test_a_cell_that_lacks_several_trains_on_until_it_has_to_start_anew(tmp_path):
    """A gang of four, with two. With the third one it would be three; with the fourth one it leaves to be whole."""
    gang = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 4, "num_experts": 8}
    gangs = Given(tmp_path, **gang)
    for rank in (7, 6):
        gangs.give_up(rank, rank)
    assert gangs.node.places == "2"
    rank, slot, says = gangs.readmit(7)
    assert (rank, slot) == (6, 7)
    assert "ranks 4 to 7, trains with 2 ranks until it lacks none, and still lacks 1." in says
    assert gangs.node.places == "3", "those that start from now on are of three"
    assert gangs.node.due() == [(6, 7)]
    assert gangs.readmit(6)[:2] == (7, 6)
    assert gangs.node.places == "0"


def test_a_rank_that_still_has_starts_is_not_meant(whole):
    whole.node.ends(1, 1, KILLED)
    with pytest.raises(ConfigError, match=r"is started again by itself, in 0\.5 s, and was not given up"):
        whole.readmit(1)
    with pytest.raises(ConfigError, match="rank 2 has ended, and was not given up"):
        whole.readmit(2)


def test_a_job_that_starts_no_ranks_again_by_itself(tmp_path):
    given = Given(tmp_path, {}, tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    for rank, code in ((1, KILLED), (0, EXIT_FENCED)):
        given.node.ends(rank, rank, code)
        assert given.node.due() == []
        assert given.readmit(rank)[:2] == (rank, rank)
        assert given.node.due() == [(rank, rank)]


# -- from another shell -------------------------------------------------------------------------------


def run_folder(tmp_path, **differs):
    """With a record that agent 0 of a job has started rank 5 here."""
    folder = tmp_path / "run"
    name = f"job{os.getpid()}{tmp_path.name}"
    Journal(folder, source="agent0", job=name).event("rank_started", target=5, pid=1, host="gpu0", **differs)
    return folder, name


def refused(capsys, folder, *flags) -> str:
    assert cli.main(["readmit", str(folder), *flags]) == 2
    return capsys.readouterr().err


def test_a_run_that_nobody_knows(tmp_path, capsys):
    assert "has no record of a rank 5" in refused(capsys, tmp_path, "--rank", "5")
    assert "--rank" in refused(capsys, tmp_path)


@pytest.mark.parametrize("job", ["", "x" * 200, "a/b", "\0", "ü"])
def test_a_journal_that_names_no_job(tmp_path, capsys, job):
    Journal(tmp_path, source="agent0", job=job).event("rank_started", target=5, pid=1, host="gpu0")
    Journal(tmp_path, source="agent" + "9" * 100, job="x").event("rank_started", target=5, pid=1)
    assert "has no record of a rank 5" in refused(capsys, tmp_path, "--rank", "5")


@pytest.mark.parametrize("command", ["readmit", "inject"])
def test_of_a_long_journal_no_steps_are_read(tmp_path, capsys, monkeypatch, command):
    folder, name = run_folder(tmp_path)
    nobody = 2**30
    Journal(folder, source="agent0", job=name).event("rank_started", target=4, pid=nobody, host="gpu0")
    rank = Journal(folder, source="rank5", rank=5, job=name)
    for step in range(100):
        rank.event("step_committed", step=step, loss={})
    (folder / "journal" / "rank6.jsonl").mkdir()  # whoever reads it fails
    parsed, whole = [], journal.event_of
    monkeypatch.setattr(journal, "event_of", lambda row: parsed.append(row) or whole(row))
    assert cli.main([command, str(folder), "--rank", "4"]) == 2
    assert re.search("cannot be reached|is not running", capsys.readouterr().err)
    assert len(parsed) == 2


def test_a_job_or_a_node_that_is_gone(tmp_path, capsys):
    folder, name = run_folder(tmp_path)
    said = refused(capsys, folder, "--rank", "5")
    assert "the agent of node 0" in said
    assert "'odyssey join'" in said
    Journal(folder, source="agent0", job=name).event("job_finished", verdict="done", exit_code=0)
    assert "has ended (done)" in refused(capsys, folder, "--rank", "5")


def test_an_agent_on_another_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(journal, "clock", lambda: "the other host's")
    folder, _ = run_folder(tmp_path)
    monkeypatch.undo()
    said = refused(capsys, folder, "--rank", "5")
    assert "rank 5 is of node 0, whose machine is gpu0: call this command there" in said
    assert "'odyssey join'" in said


class Agent:
    """Answers as ``do`` says, as often as an agent looks."""

    def __init__(self, name, do):
        self.requests, self.do, self.ends = Requests(name, 0), do, threading.Event()
        self.requests.answer(do)  # from now on it has its name
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.ends.wait(0.01):
            self.requests.answer(self.do)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()
        self.requests.close()


def no(request: Request) -> str:
    raise ConfigError(f"rank {request.rank} on {request.gpu}: no")


def test_what_the_agent_says_is_told(tmp_path, capsys):
    folder, name = run_folder(tmp_path)
    heard = []
    with Agent(name, lambda request: heard.append(request) or "it starts"):
        assert cli.main(["readmit", str(folder), "--rank", "5", "--gpu", "2"]) == 0
    assert capsys.readouterr().out == "it starts\n"
    assert [(one.rank, one.gpu) for one in heard] == [(5, 2)]
    with Agent(name, no):
        assert "odyssey readmit: rank 5 on None: no" in refused(capsys, folder, "--rank", "5")


def test_an_agent_that_stands_still_does_nothing_later(tmp_path):
    heard, agent = [], Requests("still" + tmp_path.name, 0)
    agent.answer(heard.append)
    with pytest.raises(ConfigError, match=r"has not answered for 0\.2 s, so nothing is done"):
        requests.ask("still" + tmp_path.name, 0, 5, None, within_s=0.2)
    agent.answer(heard.append)
    assert not heard
    agent.close()


def test_an_agent_has_its_name_once_another_one_that_had_it_is_gone(tmp_path):
    first, second = (Requests("twice" + tmp_path.name, 0) for _ in range(2))
    first.answer(no)
    second.answer(no)
    first.close()
    with pytest.raises(ConnectionRefusedError):
        requests.ask("twice" + tmp_path.name, 0, 5, None)
    second.answer(no)
    with pytest.raises(ConfigError, match="has not answered"):
        requests.ask("twice" + tmp_path.name, 0, 5, None, within_s=0.1)
    second.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_not_heard(tmp_path):
    name, heard = "foreign" + tmp_path.name, []
    program = (
        "import os, sys; from odyssey_megatron.launch.wire import requests; os.setuid(65534); "
        "requests.ask(sys.argv[1], 0, 5, None)"
    )
    with Agent(name, heard.append):
        command = [sys.executable, "-c", program, name]
        got = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "the job is another user's" in got.stderr
    assert not heard


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_s_answer_is_not_believed(tmp_path, capsys):
    """Who has taken the agent's name, once it was gone. An owner of the journal, for whom root asks, is believed."""
    folder, name = run_folder(tmp_path)
    program = (
        "import os, sys; from odyssey_megatron.launch.wire import requests; os.setuid(65534); "
        "own = requests._socket(requests._name(sys.argv[1], 0)); print('there', flush=True); "
        '[own.sendto(b\'{"done": true, "says": "rank 5 starts"}\', requests._receive(own)[2]) for _ in range(2)]'
    )
    with subprocess.Popen([sys.executable, "-c", program, name], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"there\n"
        said = refused(capsys, folder, "--rank", "5")
        assert "user 65534 has answered in the place of the agent of node 0, and is not believed" in said
        os.chown(folder / "journal" / "agent0.jsonl", 65534, -1)
        assert cli.main(["readmit", str(folder), "--rank", "5"]) == 0
        assert other.wait(20) == 0
    assert capsys.readouterr().out == "rank 5 starts\n"


def test_what_is_no_request_harms_nobody(tmp_path):
    name, heard = "noise" + tmp_path.name, []
    with Agent(name, lambda request: heard.append(request) or "yes"):
        own = requests._socket("")
        for text in (b"", b"\xff", b"{}", b"[" * 3000, b'{"rank": "5", "gpu": null, "until_s": 1e9}'):
            own.sendto(text, requests._name(name, 0))
            assert b"another version" in own.recv(4096)
        own.close()
        assert requests.ask(name, 0, 5, None) == "yes"
    assert len(heard) == 1


# -- a job --------------------------------------------------------------------------------------------


def pids(run, rank):
    return [event["pid"] for event in events(run, "rank_started") if event["target"] == rank]


def until_given_up(run, rank):
    """Kills each process of ``rank``, which may be started again once."""
    for count in (1, 2):
        wait_for(lambda count=count: len(pids(run, rank)) == count, 20, "the next process")
        os.kill(pids(run, rank)[-1], signal.SIGKILL)
    wait_for(lambda: events(run, "given_up"), 20, f"rank {rank} to be given up")


@pytest.mark.usefixtures("server")
def test_readmit_into_a_running_job(toy, tmp_path, capsys):
    """The toy's ranks do not join: the last process of rank 2 waits until the job ends."""
    run = tmp_path / "run"
    job = toy(4, "--steps", 30, "--hold", tmp_path / "go", "--odyssey-respawn", 1)
    wait_for(lambda: len(events(run, "recovered")) == 4, 20, "all ranks in their groups")
    said = refused(capsys, run, "--rank", "2")
    assert f"rank 2 is alive (pid {pids(run, 2)[0]}), and was not given up" in said
    until_given_up(run, 2)
    assert cli.main(["readmit", str(run), "--rank", "2"]) == 0
    assert capsys.readouterr().out.startswith(f"rank 2 starts (pid {pids(run, 2)[2]}) on GPU 2 of ")
    assert "rank 2 is alive" in refused(capsys, run, "--rank", "2")
    (tmp_path / "go").touch()
    check(job, tmp_path, steps=30, survivors={0, 1, 3})
    assert "has ended (done)" in refused(capsys, run, "--rank", "2")
    assert f"odyssey readmit {run} --rank 2" in job.log()


def test_readmit_on_another_node_than_the_job_s_host(server, tmp_path, capsys):
    run, flags = tmp_path / "run", ("--odyssey-respawn", 1)
    jobs = start(server, tmp_path, ("two nodes", "two nodes"), *flags)
    wait_for(lambda: len(events(run, "recovered")) == 4, 30, "all ranks in their groups")
    until_given_up(run, 3)
    assert cli.main(["readmit", str(run), "--rank", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"rank 3 starts (pid {pids(run, 3)[2]}) on GPU 1 of gpu1; ")
    (given_up,) = events(run, "given_up")
    assert (given_up["target"], given_up["slot"], given_up["host"]) == (3, 1, "gpu1")
    jobs[1].kill()
    jobs[1].process.wait(20)
    said = refused(capsys, run, "--rank", "3")
    assert "the agent of node 1, which has started rank 3 on this machine, cannot be reached" in said
    (tmp_path / "go").touch()
    assert jobs[0].wait(40) == 0, jobs[0].log()


def test_a_job_that_ends_starts_no_rank():
    """Or is only watched."""
    ranks = Ranks(None, None, Received(), None, None)
    with pytest.raises(ConfigError, match="the job was asked to end, or is only watched"):
        ranks.readmit(Request(rank=1, gpu=None, until_s=0.0))


@pytest.mark.usefixtures("server")
def test_readmit_without_respawn(toy, tmp_path, capsys):
    run = tmp_path / "run"
    job = toy(4, "--steps", 30, "--hold", tmp_path / "go", "--odyssey-inject", "rank=2,step=5,at=forward")
    wait_for(lambda: events(run, "given_up"), 20, "rank 2 to be given up")
    assert cli.main(["readmit", str(run), "--rank", "2"]) == 0
    assert capsys.readouterr().out.startswith(f"rank 2 starts (pid {pids(run, 2)[1]}) on GPU 2 of ")
    (tmp_path / "go").touch()
    check(job, tmp_path, steps=30, survivors={0, 1, 3})
