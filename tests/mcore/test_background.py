"""Saves that are written beside training, by one rank whose file system answers late, or never."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.errors import PeerFailed  # noqa: E402
from odyssey_megatron.mcore.loop import attempts, background, deleting, saving  # noqa: E402


class World:
    """The group of one rank, in place of torch.distributed."""

    @staticmethod
    def size():
        return 1

    @staticmethod
    def get_world_size():
        return 1

    @staticmethod
    def get_rank():
        return 0

    @staticmethod
    def all_gather_object(found, own, group=None):
        found[:] = [own]


class Rank:
    """The only rank of a job, with the saves that it has begun, and what was said of those that failed."""

    def __init__(self, limit_s: float):
        self.answers = threading.Event()
        """Whether the file system answers."""
        self.begun: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.session = SimpleNamespace(
            rank=0,
            config=SimpleNamespace(op_timeout_s=limit_s),
            member=SimpleNamespace(newer_than=lambda generation: generation < self.runtime.generation),
            note_save=lambda step, save_s: None,
            note_not_saved=lambda iteration, why: self.failed.append((iteration, why)),
        )
        position = SimpleNamespace(votes=SimpleNamespace(writing=1, ballots=0))
        self.runtime = SimpleNamespace(generation=1, committed=0, ballot=SimpleNamespace(), position=position)
        self.saves = background.Saves(self.together, [])
        self.saves.attach(self.session, self.runtime, None, lambda *args, **kwargs: None)

    def together(self, work):
        while True:
            try:
                return work(World)
            except PeerFailed:
                self.runtime.generation += 1

    def save(self, iteration: int) -> None:
        self.runtime.committed = iteration
        self.saves.save_checkpoint(None, iteration, None, None, None, 0.0)

    def begin(self, original, iteration, *args, **kwargs) -> str:
        self.begun.append(iteration)
        request = SimpleNamespace(
            finalize_fns=(),
            async_fn=self.answers.wait,
            async_fn_args=(),
            async_fn_kwargs={},
            preload_fn=None,
        )
        self.saves.schedule(None, request)
        return ""


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(background, "dist", World)  # the default group may be another test's
    one = Rank(limit_s=0.5)
    monkeypatch.setattr(saving, "attempt", one.begin)
    monkeypatch.setattr(saving, "complete", lambda *args, **kwargs: "")
    monkeypatch.setattr(saving, "tidy", lambda *args, **kwargs: None)
    monkeypatch.setattr(saving, "finish", lambda *args, **kwargs: False)
    monkeypatch.setattr(saving, "where", lambda *args, **kwargs: Path("saved") / "one")
    yield one
    one.answers.set()


@pytest.mark.timeout(30)
def test_a_file_system_that_does_not_answer_fails_the_save_and_those_that_follow(rank):
    rank.save(2)
    rank.save(4)
    (late, first), (refused, second) = rank.failed
    assert (late, refused) == (2, 4)
    assert "rank 0 could not write a file: TimeoutError" in first
    assert "rank 0 still writes the save of iteration 2" in second
    rank.save(6)
    assert [iteration for iteration, _ in rank.failed] == [2, 4, 6]
    assert rank.saves.not_saved
    assert rank.begun == [2], "a save began beside a thread that hangs, and keeps a copy of its own"
    rank.answers.set()
    rank.saves._given_up[0]._thread.join()
    rank.save(8)
    rank.saves.finalize(blocking=True)
    assert rank.begun == [2, 8]
    assert not rank.saves.not_saved


@pytest.mark.timeout(30)
def test_a_save_whose_generation_ended_is_said_and_the_one_that_is_due_begins(rank):
    """It is written still, as its file system is slow and not gone."""
    rank.save(2)
    rank.runtime.generation += 1
    rank.save(4)
    ((iteration, why),) = rank.failed
    assert iteration == 2
    assert "given up: its generation ended" in why
    assert rank.begun == [2, 4]
    assert not rank.saves.not_saved


@pytest.fixture
def deleted(monkeypatch):
    """What was to be deleted, once a save that a death has cut short is found in its place."""
    names: list[str] = []
    monkeypatch.setattr(saving, "finish", lambda *args, **kwargs: True)
    monkeypatch.setattr(attempts, "noted", SimpleNamespace(latest_before="iter_0000001"))
    monkeypatch.setattr(deleting, "delete_before", lambda folder, name: names.append(name))
    return names


@pytest.mark.timeout(30)
@pytest.mark.parametrize("then", ["a rank dies", "the disk is full"])
def test_a_save_that_has_come_to_its_end_is_not_made_again(rank, deleted, monkeypatch, then):
    """Its checkpoint has its name, though the rank that gave it could tell nobody."""

    def dies(original, iteration, *args, **kwargs):
        rank.begun.append(iteration)
        raise PeerFailed("rank 0") if then == "a rank dies" else OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "attempt", dies)
    rank.save(2)
    assert rank.begun == [2]
    assert (rank.failed, rank.saves.not_saved) == ([], "")
    assert deleted == ["iter_0000001"]


@pytest.mark.timeout(30)
def test_nor_is_one_that_was_written_beside_training(rank, deleted):
    rank.save(2)
    rank.answers.set()
    rank.runtime.generation += 1
    rank.runtime.committed = 3
    rank.saves.finalize(blocking=True)
    assert rank.begun == [2]
    assert (rank.failed, rank.saves.not_saved) == ([], "")
    assert deleted == ["iter_0000001"]


def in_memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(30)
def test_memory_of_copies_is_given_back_once_they_are_written(rank):
    """Between saves a rank would keep a copy's size."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("memory is given back by glibc")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    size, blocks = 4 << 20, 50
    libc.free(libc.malloc(6 * size))  # from here on glibc takes smaller blocks from its heap
    copies = [libc.malloc(size) for _ in range(blocks)]
    for one in copies:
        ctypes.memset(one, 1, size)
    for one in copies[:-1]:
        libc.free(one)
    kept_bytes = in_memory_bytes()
    rank.save(2)
    rank.answers.set()
    rank.saves.finalize(blocking=True)
    freed_bytes = kept_bytes - in_memory_bytes()
    libc.free(copies[-1])
    assert freed_bytes > 0.9 * blocks * size
