"""Silent processes: at work, stopped, or waiting for ever with Python's lock kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from odyssey_megatron.launch.agent.ranks import Fence, _Process
from odyssey_megatron.launch.process.working import Work, _threads

HANG_S, WORKS_S = 0.8, 2.4
SILENT = {
    # C code that never gives the lock away; others of its threads want it.
    "computes": "sum(range(10**11))",
    "waits": "import ctypes; ctypes.PyDLL(None).sleep(60)",
    "is stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
}
THREADS = """
import threading, time

def beat():
    while True:
        time.sleep(0.02)

import ctypes
ctypes.CDLL(None).prctl(15, b"caf\\xc3", 0, 0, 0)  # a name that was cut within a character
for _ in range(4):
    threading.Thread(target=beat, daemon=True).start()
time.sleep(0.1)
print(flush=True)
"""


@pytest.fixture
def silent(request):
    command = [sys.executable, "-c", THREADS + SILENT[request.param]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def ended_after_s(process, *, gave_up=False) -> float:
    """How long a fence lets it be silent."""
    fence, one = Fence(HANG_S, WORKS_S, kills=False), _Process(rank=0, slot=0, handle=process, incarnation=0)
    began_s = time.monotonic()
    while not fence.is_due(one, (silent_s := time.monotonic() - began_s), gave_up, time.monotonic()):
        assert silent_s < 10
        time.sleep(HANG_S / 10)
    return silent_s


@pytest.mark.parametrize(
    ("silent", "gave_up", "limit_s"),
    [
        ("computes", False, WORKS_S),
        ("computes", True, HANG_S),  # it has found its own training thread to be stuck
        ("waits", False, HANG_S),
        ("is stopped", False, HANG_S),
    ],
    indirect=["silent"],
)
def test_who_works_may_be_silent_for_longer(silent, gave_up, limit_s):
    assert limit_s < ended_after_s(silent, gave_up=gave_up) < limit_s + HANG_S


@pytest.mark.parametrize("silent", ["waits"], indirect=True)
def test_threads_that_want_the_lock_do_not_count_as_work(silent):
    began_s, before_s = time.monotonic(), _threads(silent.pid)[1]
    time.sleep(1.0)
    assert _threads(silent.pid)[1] - before_s < 0.03 * (time.monotonic() - began_s)


def test_who_has_ended_does_not_work():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert not Work(pid=process.pid, since_s=0.0).goes_on(1.0)
