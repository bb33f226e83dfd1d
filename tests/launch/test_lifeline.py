"""The lifeline: a process's end is seen as it begins, and how the process ends."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time

import pytest

from odyssey_megatron.launch.process.lifeline import Lifeline, exit_code

ENDS = {
    "killed": (lambda: time.sleep(60), -signal.SIGKILL),
    "ends itself": (lambda: os.kill(os.getpid(), signal.SIGUSR1), -signal.SIGUSR1),
    "exit": (lambda: os._exit(7), 7),
    "success": (lambda: os._exit(0), None),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_the_holder_and_its_exit_code(end: str):
    act, expected = ENDS[end]
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    line = Lifeline(memory, 128)
    line.create()
    pid = os.fork()
    if pid == 0:
        line.take()
        memory[0] = 1
        while memory[1] == 0:
            time.sleep(0.001)
        act()
    while memory[0] == 0:
        time.sleep(0.001)
    seen: list[int | None] = []
    waiter = threading.Thread(target=lambda: (line.await_end(), seen.append(exit_code(pid))))
    waiter.start()
    time.sleep(0.05)
    assert not seen, "the holder lives"
    memory[1] = 1
    if end == "killed":
        os.kill(pid, signal.SIGKILL)
    waiter.join(10)
    assert seen == [expected]
    os.waitpid(pid, 0)
    line.take()  # can be taken again, by the next process in this slot


def test_a_process_that_is_gone_has_no_exit_code():
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    os.waitpid(pid, 0)
    assert exit_code(pid) is None
