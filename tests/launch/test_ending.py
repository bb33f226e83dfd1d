"""How ranks end, by an error of their own or trained, in interpreters that nothing was preloaded for: as on GPUs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from textwrap import dedent

import pytest

from odyssey_megatron.codec import to_json
from odyssey_megatron.launch.rank.attention import Attention
from odyssey_megatron.launch.rank.watch import Watch
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.plan.sending.generation import Finished

SCRIPT = """
    import atexit, sys, threading, time

    from odyssey_megatron.launch.process.ending import will_exit_with

    class Slow:
        def __del__(self):  # an interpreter's last part
            time.sleep(60)

    slow = Slow()
    slow.itself = slow
    atexit.register(lambda: print("first registered, once"))
    try:
        {end}
    except BaseException:
        will_exit_with(7)
        atexit.register(lambda: print("registered behind it"))
        raise
    finally:
        print("finally")
"""


@pytest.mark.parametrize(
    ("end", "said"), [("sys.exit(7)", ""), ("raise ValueError('of its own')", "ValueError: of its own")]
)
def test_it_ends_with_its_code_and_without_the_interpreter_s_last_part(end, said):
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", dedent(SCRIPT).format(end=end)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 7
    assert said in done.stderr
    assert time.monotonic() - began_s < 30
    lines = done.stdout.splitlines()
    assert lines[0] == "finally"
    assert lines.count("first registered, once") == 1
    assert "registered behind it" in lines


def test_nobody_waits_for_the_store_any_more_once_all_have_finished(connect):
    """The store's end would wake that thread in an interpreter that is ending, which it aborts."""
    attention = Attention(60.0, 30.0, time.monotonic())
    watch = Watch(
        connect(), lambda text: None, attention, fallen_everywhere=lambda *_: True, alone_s=0.0, settled=True
    )
    before = set(threading.enumerate())
    watch.start()
    (thread,) = set(threading.enumerate()) - before
    connect().put(keys.generation_key(1), to_json(Finished(number=1)))
    thread.join(20.0)
    assert not thread.is_alive()
    assert watch.newest() == (1, to_json(Finished(number=1)))
    assert watch.lost is None
