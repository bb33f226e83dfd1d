"""Leaving calls that do not end."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref

import pytest

from odyssey_megatron.errors import PeerFailed, Superseded
from odyssey_megatron.rebuild.abort import GlooAbort, NcclAbort


def helpers() -> int:
    return sum(thread.name == "odyssey-wait" for thread in threading.enumerate())


def eventually(condition, timeout_s=5.0):
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def fail(error):
    raise error


@pytest.fixture
def abort():
    abort = GlooAbort()
    yield abort
    abort.close()
    eventually(lambda: helpers() == 0)


def test_results_and_errors(abort):
    assert abort.call(lambda: 7) == 7
    with pytest.raises(PeerFailed, match="connection closed"):
        abort.call(lambda: fail(RuntimeError("connection closed")))
    with pytest.raises(KeyError):  # not gloo's: a bug, shown as it is
        abort.call(lambda: fail(KeyError("x")))
    assert abort.call(lambda: 8) == 8
    assert helpers() == 1, "one helper does for calls that come one after the other"


def test_a_call_that_does_not_end_is_left(abort):
    release = threading.Event()
    threading.Timer(0.05, abort.fire).start()
    began_s = time.monotonic()
    with pytest.raises(Superseded):
        abort.call(lambda: release.wait(30))
    assert time.monotonic() - began_s < 1.0
    with pytest.raises(Superseded):
        abort.call(lambda: 7)
    abort.close()
    assert helpers() == 1, "the one that was left"
    release.set()
    eventually(lambda: helpers() == 0)


def test_an_error_after_the_abort_is_the_abort(abort):
    release = threading.Event()

    def fire_then_fail():
        abort.fire()
        release.wait(0.05)
        raise RuntimeError("connection closed")

    with pytest.raises(Superseded):
        abort.call(fire_then_fail)


def test_threads_have_a_helper_each(abort):
    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=lambda: abort.call(lambda: barrier.wait(5))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert helpers() == 3


def test_a_failed_call_keeps_nothing_alive(abort):
    """A cycle through the error's traceback would keep a group's threads until the next collection."""

    class Work:
        def wait(self):
            raise RuntimeError("connection closed")

    gc.disable()
    try:
        work = Work()
        gone = weakref.ref(work)
        with pytest.raises(PeerFailed):
            abort.call(work.wait)
        del work
        eventually(lambda: gone() is None)
    finally:
        gc.enable()


def test_sockets_of_a_generation_are_shut_down_and_no_others(abort):
    before = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    with abort.connecting():
        mine = socket.socketpair()
        listening = socket.create_server(("127.0.0.1", 0))
    abort.fire()
    assert mine[1].recv(1) == b""
    before[0].send(b"x")
    assert before[1].recv(1) == b"x"
    for one in (listener, listening):
        socket.create_connection(one.getsockname()).close()
    with pytest.raises(Superseded), abort.connecting():
        late = socket.socketpair()
    assert late[1].recv(1) == b""
    for one in (*before, *mine, *late, listener, listening):
        one.close()


def test_nccl_aborts_its_backends_once():
    class Backend:
        aborted = 0

        def abort(self):
            self.aborted += 1

    abort, backend = NcclAbort(), Backend()
    abort.adopt(backend)
    assert abort.call(lambda: 7) == 7
    with pytest.raises(PeerFailed):
        abort.call(lambda: fail(RuntimeError("ncclRemoteError")))
    abort.fire()
    abort.fire()
    assert backend.aborted == 1
    with pytest.raises(Superseded):
        abort.call(lambda: 7)
