"""Which broken cell becomes whole again, out of what."""

from __future__ import annotations

import subprocess
import time
from itertools import combinations
from types import MappingProxyType, SimpleNamespace

import pytest

pytest.importorskip("torch")

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.places import ComesBack, Move, Places, completed, left_of_cells, shrunk
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import EXIT_FENCED, EXIT_NOT_SAVED
from odyssey_megatron.launch.agent.ranks import Fence, Ranks
from odyssey_megatron.launch.agent.respawn import Respawn
from odyssey_megatron.launch.process.heartbeat import HeartbeatBoard
from odyssey_megatron.launch.process.signals import Received
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.launch.wire.local_rendezvous import LocalRendezvous
from odyssey_megatron.launch.wire.requests import Request
from odyssey_megatron.metrics.journal import Journal, read_journal

EIGHT = {rank: rank for rank in range(8)}


def left(*lost: int) -> dict[int, int]:
    return {rank: slot for rank, slot in EIGHT.items() if rank not in lost}


@pytest.mark.parametrize(
    ("cell_size", "lost", "expected"),
    [
        (1, [3], {}),  # nobody stands by
        (1, [3, 5], {}),
        (2, [3], {}),  # rank 2 stands by, and nothing lacks it
        (2, [3, 6], {3: 7}),
        (2, [6, 3], {3: 7}),  # the order of the deaths does not matter
        (2, [2, 3, 5], {}),  # both of one cell are gone
        (2, [3, 4, 6], {3: 5}),
        (4, [1, 6], {1: 4}),
        (4, [1, 5, 6], {1: 4}),
        (4, [1, 2, 5], {5: 0}),  # the cell that lacks fewest
        (4, [0, 1, 4, 5], {0: 6, 1: 7}),
        (4, [0, 1, 2, 4, 5], {}),  # lacks two, and one is left
    ],
)
def test_one_broken_cell_is_completed_from_the_others(cell_size, lost, expected):
    assert completed(left(*lost), lost, cell_size) == expected


@pytest.mark.parametrize(
    ("sizes", "lost", "expected"),
    [
        ((4, 2, 1), [3], {0: 2}),
        ((4, 2, 1), [3, 4], {0: 2, 1: 4}),  # the rank that stood by makes the other one whole
        ((4, 2, 1), [3, 4, 0], {0: 1, 1: 4}),
        ((4, 2, 1), [3, 4, 2], {0: 4, 1: 1}),  # in slot 2 is a rank of the other cell by now
        ((4, 2, 1), [4, 5, 6, 7], {1: 0}),
        ((4,), [3], {0: 0}),
        ((4,), [3, 4], {0: 0, 1: 4}),
        ((8, 7, 6, 5, 4, 3, 2, 1), [3, 6], {0: 6}),
        ((16, 8, 4, 2, 1), [3], {0: 0}),  # the rest of the cell is on another node
    ],
)
def test_what_is_left_of_a_node_s_cells(sizes, lost, expected):
    assert left_of_cells(EIGHT, lost, sizes) == expected


def test_slots_stay_with_their_processes():
    """Rank 3 plays in slot 7 by now, and dies there for good, as does rank 4: rank 2 is what cell 1 has left."""
    slots = {0: 0, 1: 1, 2: 2, 5: 5}
    assert completed(slots, [6, 7, 3, 4], 2) == {3: 5}


@pytest.mark.parametrize(
    ("cell_size", "lost", "worker", "size", "moves"),
    [
        (2, [3], 1, 1, {}),  # rank 2 alone
        (2, [2], 1, 1, {2: 3}),  # rank 3 plays it
        (2, [2, 3], 1, 0, {}),
        (2, [3], 0, 2, {}),  # whole
        (4, [5], 1, 2, {5: 7}),  # and rank 6 stands by
        (4, [7], 1, 2, {}),
        (4, [4, 5], 1, 2, {4: 7, 5: 6}),
        (4, [4, 5, 6], 1, 1, {4: 7}),
        (8, [0, 1, 2, 3, 4], 0, 2, {0: 7, 1: 6}),  # of three that are left two divide eight
    ],
)
def test_what_is_left_of_a_cell_has_its_first_numbers(cell_size, lost, worker, size, moves):
    sizes = [one for one in range(cell_size, 0, -1) if cell_size % one == 0]
    assert shrunk(left(*lost), worker, sizes) == (size, moves)


@pytest.mark.parametrize("lost", [subset for n in range(7) for subset in combinations(range(6), n)])
def test_as_many_ranks_go_on_as_divide_a_cell(lost):
    slots = left(*lost)
    size, moves = shrunk(slots, 0, [6, 3, 2, 1])
    living = 6 - len(lost)
    assert size == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 3, 6: 6}[living]
    there = (set(slots) | set(moves)) - set(moves.values())
    assert set(range(size)) <= there
    assert set(moves) <= set(lost)


def test_no_rank_of_a_cell_that_trains_goes_to_another():
    """Cells 0 and 1, of four ranks, lack one and two."""
    slots = left(3, 6, 7)
    assert completed(slots, [3, 6, 7], 4) == {3: 4}
    assert completed(slots, [3, 6, 7], 4, {0: 2, 1: 2}) == {}
    assert completed(slots, [3, 6, 7], 4, {1: 2}) == {6: 0, 7: 1}, "four and one, rather than twice two"
    assert completed(left(3, 7), [3, 7], 4, {0: 2}) == {7: 2}, "what stands by beside a smaller cell does"
    assert completed(left(3, 4), [3, 4], 2, {1: 1}) == {3: 5}, "what has just been broken is no cell yet"


@pytest.mark.parametrize(
    ("whole_job", "lost", "smaller", "expected"),
    [
        (True, [3, 4, 5, 6, 7, 1], {1: 1}, {}),  # rank 2 alone trains
        (False, [3, 4, 5, 6, 7, 1], {1: 1}, {3: 0}),  # so do cells of other nodes
        (True, [3, 4, 5, 6, 1], {1: 1}, {1: 7}),  # the others complete one another
        (True, [3, 4, 5, 1], {1: 1}, {3: 0}),  # beside a whole cell
        (True, [3, 5, 6, 7, 1], {1: 1, 2: 1}, {3: 0}),  # beside another smaller one
    ],
)
def test_the_last_cell_that_trains_is_not_completed(whole_job, lost, smaller, expected):
    assert completed(left(*lost), lost, 2, smaller, whole_job=whole_job) == expected


def test_a_cell_that_has_become_too_small_stands_by():
    """Of four ranks two may go on, one may not; another cell can have it then."""
    places = Places(EIGHT)
    places.lose(3)
    assert places.can_shrink(0, [4, 2]) == 2
    assert places.shrink(0, [4, 2]) == []
    assert not places.too_few(0, [4, 2])
    places.lose(1)
    assert places.can_shrink(0, [4, 2]) == 2, "rank 2 can be rank 1"
    assert places.shrink(0, [4, 2]) == [Move(1, 2, 2)]
    assert places.can_shrink(0, [4, 2]) == 0
    places.lose(1)
    assert places.can_shrink(0, [4, 2]) == 0
    assert places.too_few(0, [4, 2])
    assert places.size_of(0, 4) == 0
    places.lose(5)
    assert places.complete(4)[0] == [Move(5, 0, 0)]


@pytest.mark.parametrize(
    ("slow", "size", "slots"),
    [
        ((6,), 2, [4, 5, 6, 7]),  # it stands by, beside rank 7
        ((4,), 2, [7, 5, 6, 4]),  # rank 4 plays where rank 7 was, which stands by where it is slow
        ((4, 7), 2, [6, 5, 4, 7]),
        ((4, 5), 2, [7, 6, 5, 4]),
        ((4, 5, 6), 1, [7, 5, 6, 4]),
        ((4, 5, 6, 7), 0, [4, 5, 6, 7]),
    ],
)
def test_who_is_slow_stands_by_and_nobody_is_lost(slow, size, slots):
    places = Places(EIGHT)
    assert places.set_aside(1, slow, [4, 2, 1]) == size
    assert [places.slot(rank) for rank in range(4, 8)] == slots
    assert not places.broken(4)
    assert places.size_of(4, 4) == size
    assert places.size_of(7, 4) == 0
    assert places.take_back(1, 4) == bool(size)
    assert not places.has_smaller
    assert not places.take_back(1, 4), "it is whole"


def test_a_cell_that_loses_a_rank_meanwhile_is_as_others_that_have():
    places = Places(EIGHT)
    assert places.set_aside(1, [7], [4, 2, 1]) == 2
    assert places.set_aside(1, [6], [4, 2, 1]) == 0, "it is a smaller one already"
    places.lose(4)
    assert places.shrink(1, [4, 2, 1]) == [Move(4, 7, 7)]
    assert not places.take_back(1, 4)
    places.lose(0)
    assert places.set_aside(0, [1], [4, 2, 1]) == 0
    assert places.complete(4) == ([Move(0, 6, 6)], None)


class Node:
    """Cells of two ranks, unless the job ``differs``, as their agent has them; their ends are the test's."""

    def __init__(self, folder, flags=MappingProxyType({"respawn": 1}), cells=2, **differs):
        self.rendezvous, self.folder = LocalRendezvous("test"), folder
        address = self.rendezvous.next_rendezvous().bootstrap_store_info
        self.control = Control.connect(address.master_addr, address.master_port, "token", timeout_s=5)
        sizes = {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2}
        spec = JobSpec(
            num_layers=4, num_microbatches=4, tokens_per_step=64, train_steps=10, **sizes | differs
        )
        world_size = cells * spec.cell_size
        self.control.put(keys.JOB, to_json({"job": to_json(spec), "profile": ""}))
        envs = {slot: {"RANK": str(slot), "WORLD_SIZE": str(world_size)} for slot in range(world_size)}
        journal = Journal(folder, source="agent0")
        config = OdysseyConfig(**flags)
        self.respawn = Respawn(SimpleNamespace(envs=envs), self.control, config, None, journal)
        self.now_s = 100.0

    def leaves(self, *, without=(), incarnations=(0, 0), generation=2):
        """The coordinator says as what cell 1 is to come back."""
        wanted = ComesBack(generation=generation, incarnations=incarnations, without=without)
        self.control.put(keys.comes_back_key(1), to_json(wanted))

    def ends(self, rank, slot, code=EXIT_FENCED):
        self.respawn.note_end(rank, slot, code, self.now_s)

    def due(self):
        self.now_s += 60.0
        return self.respawn.due(self.now_s)

    @property
    def places(self):
        return self.control.peek(keys.places_key(1))


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_ranks_change_places_when_both_have_left(node):
    node.leaves(without=(2,))
    node.ends(2, 2)
    assert node.places == "1"
    assert node.due() == [], "rank 3 has not left yet, and rank 2 is to start in its place"
    node.ends(3, 3)
    assert sorted(node.due()) == [(2, 3), (3, 2)]
    (shrinks,) = [one for one in read_journal(node.folder) if one["event"] == "cell_shrinks"]
    assert (shrinks["ranks"], shrinks["whole"]) == ([2], 2)


def test_the_cell_is_whole_when_it_leaves_for_that(node):
    node.leaves(without=(3,))
    node.ends(3, 3)
    node.ends(2, 2)
    assert sorted(node.due()) == [(2, 2), (3, 3)]
    node.ends(2, 2)
    assert node.places == "1", "what it left for once holds once"
    node.leaves(incarnations=(1,), generation=9)
    node.ends(2, 2)
    assert node.places == "0"


@pytest.mark.parametrize("died_before", [False, True])
def test_a_cell_that_loses_a_rank_before_it_can_leave_comes_back_whole(node, died_before):
    node.leaves(without=(2,), incarnations=(0, 0) if died_before else (1, 0))
    if died_before:
        node.ends(3, 3, code=-9)
        node.ends(2, 2)
    else:
        node.ends(2, 2)
        node.ends(3, 3)
    assert node.places is None
    assert sorted(node.due()) == [(2, 2), (3, 3)]


@pytest.mark.parametrize("died_first", [True, False])
def test_what_is_left_of_a_cell_comes_back_though_nobody_who_died_does(tmp_path, died_first):
    """By default. The last process of rank 3 ends before or after rank 2 has left with it."""
    node = Node(tmp_path, {})
    for rank, code in sorted({3: -9, 2: EXIT_FENCED}.items(), reverse=died_first):
        node.ends(rank, rank, code)
    assert node.due() == [(2, 2)]
    assert node.places == "1"
    node.ends(2, 2)
    assert node.due() == [(2, 2)], "once more, when its cell has left to be whole"
    node.ends(0, 0)
    node.ends(1, 1)
    assert node.due() == [], "a cell that was told to leave, and of which nobody has died"


def test_what_is_left_of_a_cell_has_left_where_it_may_not_be_smaller(tmp_path):
    node = Node(tmp_path, {"shrink": "off"})
    node.ends(3, 3, -9)
    node.ends(2, 2)
    assert node.due() == []
    node.respawn.readmit(3, None, "", node.now_s)
    assert sorted(node.due()) == [(2, 2), (3, 3)], "the cell is whole"


def test_a_broken_cell_is_completed_from_ranks_that_have_left(tmp_path):
    node = Node(tmp_path, {}, whole_cells_only="it has a reason")
    for rank, code in ((3, -9), (2, EXIT_FENCED), (0, EXIT_FENCED)):
        node.ends(rank, rank, code)
        assert node.due() == []
    node.ends(1, 1, -9)
    assert sorted(node.due()) == [(0, 0), (1, 2)]
    assert not node.respawn.wanted


@pytest.mark.parametrize(
    ("why", "left", "rest"), [("", [4, 5, 6], ""), ("it has a reason", [4, 5], "ranks [6] stand by")]
)
def test_an_agent_says_why_a_gang_goes_on_without_ranks_that_are_left(tmp_path, capfd, why, left, rest):
    gang = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 4, "num_experts": 8}
    node = Node(tmp_path, **gang, even_gangs_only=why)
    for _ in range(2):
        node.ends(7, 7, code=-9)
        node.due()
    (shrinks,) = [one for one in read_journal(node.folder) if one["event"] == "cell_shrinks"]
    assert (shrinks["ranks"], shrinks["whole"]) == (left, 4)
    said = capfd.readouterr().err
    assert rest in said
    assert why in said
    assert ("stand by" in said) == bool(rest)


@pytest.mark.parametrize(("said", "then"), [("0", ""), ("0/2", ""), ("", ""), ("10000", "10000")])
def test_an_agent_that_stood_still_does_not_say_that_ranks_of_the_next_one_have_died(node, said, then):
    """It ends, and its own ranks do before it has noticed."""
    node.control.put(keys.here_key(2), said)
    node.ends(2, 2)
    assert node.control.peek(keys.here_key(2)) == then


@pytest.mark.parametrize(
    ("code", "said", "unsaid"),
    [
        (-9, "is given up, with GPU 1 of", "lease"),
        (EXIT_FENCED, "did not renew its lease", "GPU works again"),
    ],
)
def test_what_people_are_told_of_a_rank_that_stays_out(tmp_path, capfd, code, said, unsaid):
    """Nothing is wrong with the GPU of a rank whose node has only stood still."""
    node = Node(tmp_path, {}, tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    node.ends(1, 1, code)
    told = capfd.readouterr().err
    assert said in told
    assert unsaid not in told
    assert "--odyssey-respawn 0" in told
    assert "--rank 1" in told.partition("odyssey readmit")[2]


def test_a_rank_whose_last_checkpoint_failed_is_not_given_up(tmp_path, capfd):
    """It ends in this way before the job's end has reached its agent."""
    node = Node(tmp_path, {}, tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    node.ends(1, 1, EXIT_NOT_SAVED)
    assert capfd.readouterr().err == ""
    assert node.due() == []


def begin(node, *codes):
    """Have processes end, as (rank, slot, exit code), and begin whatever is due."""
    for rank, slot, code in codes:
        node.ends(rank, slot, code)
    for rank, slot in node.due():
        node.respawn.begin(rank, slot, node.now_s)


@pytest.mark.parametrize("completed", [False, True])
def test_a_smaller_cell_is_let_train_until_it_leaves_to_be_whole(tmp_path, completed):
    """Rank 2 trains alone, and alone has all layers once rank 1 is dead. Rank 3, which would make its cell whole, on
    its own GPU or on that of rank 4, holds nothing yet when it dies.
    """
    node = Node(tmp_path, {}, cells=3)
    begin(node, (3, 3, -9), (2, 2, EXIT_FENCED))
    if completed:
        begin(node, (5, 5, -9), (4, 4, EXIT_FENCED))
        (taken,) = [one for one in read_journal(node.folder) if one["event"] == "place_taken"]
        assert (taken["target"], taken["spare"]) == (3, 4)
    else:
        node.respawn.readmit(3, None, "", node.now_s)
        begin(node)
    assert node.places == "0", "it is to be whole"
    begin(node, (1, 1, -9), (0, 0, EXIT_FENCED))
    begin(node, (3, 4 if completed else 3, -9))
    assert not node.respawn.wanted, "nobody who trains is ended"
    assert node.places == "1"


def test_what_is_left_of_two_cells_trains_where_they_are_all_that_is_left(tmp_path):
    node = Node(tmp_path, {})
    begin(node, (3, 3, -9), (2, 2, EXIT_FENCED))
    begin(node, (1, 1, -9), (0, 0, EXIT_FENCED))
    assert [node.control.peek(keys.places_key(worker)) for worker in (0, 1)] == ["1", "1"]
    shrinks = [one["ranks"] for one in read_journal(node.folder) if one["event"] == "cell_shrinks"]
    assert shrinks == [[2], [0]]


def test_a_cell_that_has_left_to_be_whole_can_complete_another_when_it_breaks(tmp_path):
    node = Node(tmp_path, {}, cells=3)
    begin(node, (3, 3, -9), (2, 2, EXIT_FENCED))
    node.respawn.readmit(3, None, "", node.now_s)
    begin(node, (2, 2, EXIT_FENCED))
    begin(node, (1, 1, -9), (0, 0, EXIT_FENCED))
    assert node.respawn._smaller_size(0) == 1
    begin(node, (3, 3, -9))
    assert node.respawn.wanted == {2}, "it is about to leave, as its cell has lost a rank"


@pytest.fixture
def sleeps():
    """Starts processes that do nothing."""
    started = []

    def start(*_):
        started.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ranks_of(node, said, processes):
    """Those ``processes`` (rank -> its process) in the slots of the same numbers, as the agent has them."""
    board = HeartbeatBoard(12)
    board.close()  # its memory stays
    fence, control = Fence(60.0, 60.0, kills=True), SimpleNamespace(send=said.append)
    ranks = Ranks(control, board, Received(), fence, node.respawn)
    for rank, process in processes.items():
        ranks.add(rank, rank, process, 0)
    return ranks


def test_who_makes_room_for_another_rank_is_no_loss(tmp_path, sleeps):
    """Rank 2 stands by, as rank 3 is dead, when rank 1 is killed, which then starts where rank 2 was."""
    node, said = Node(tmp_path, {}, whole_cells_only="it has a reason"), []
    node.ends(3, 3, -9)
    processes = {rank: sleeps() for rank in (1, 2)}
    ranks = ranks_of(node, said, processes)
    processes[1].kill()
    ends_s = time.monotonic() + 20
    while len(said) < 2 and time.monotonic() < ends_s:
        ranks._reap(100, report=True)
    assert [(one.rank, one.code, one.cause) for one in said] == [(1, -9, "killed"), (2, -9, "moved")]


def test_who_makes_room_for_a_rank_of_its_cell_once_another_is_readmitted_ends_at_once(tmp_path, sleeps):
    """Of cell 2, rank 11 stands by alone, as ranks 8 and 10 have completed cell 0. With one more rank they are a
    smaller cell, whose second rank is to start where rank 11 is.
    """
    cells = {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "whole_shards_only": "it has a reason",
    }
    node = Node(tmp_path, {}, cells=3, **cells)
    for rank in (2, 3, 9, 8, 10):
        node.ends(rank, rank, -9)
    assert not node.respawn.wanted
    stands_by = sleeps()
    node.respawn.start = lambda rank, slot: (sleeps(), 1)
    ranks = ranks_of(node, [], {11: stands_by})
    assert "rank 8 starts" in ranks.readmit(Request(rank=2, gpu=None, until_s=0.0))
    assert node.respawn.wanted == {11}
    assert stands_by.wait(10) == -9
