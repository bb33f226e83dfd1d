"""What a signal to an agent means to its ranks."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.launch.agent.asking import Asking
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.launch.wire.local_rendezvous import LocalRendezvous
from odyssey_megatron.metrics.journal import Journal


class Node:
    """Node 1, whose ranks are played by the test."""

    def __init__(self, folder):
        self.rendezvous = LocalRendezvous("test")
        address = self.rendezvous.next_rendezvous().bootstrap_store_info
        self.control = Control.connect(address.master_addr, address.master_port, "token", timeout_s=10.0)
        self.asked, self.given, self.ends = list[Ask](), [], False
        self.ranks = SimpleNamespace(signals=self, listen=True, ask=self.asked.append, give_up=lambda: None)
        self.pending = [signal.SIGTERM]
        self.asking = Asking(
            "leave", Journal(folder, source="agent1"), node=1, hosts=False, others=(1,), terminate_s=5.0,
            ends=lambda: self.ends, joining=lambda: False,
        )  # fmt: skip

    def take(self):
        found, self.pending = self.pending, []
        return found

    def heed(self):
        self.asking.heed(self.ranks, SimpleNamespace(give=self.given.append), self.control)


@pytest.mark.parametrize("listen", [True, False], ids=["is about to", "has left"])
def test_a_node_that_may_leave_ends_with_the_job_if_that_ends_first(tmp_path, listen):
    node = Node(tmp_path)
    node.heed()
    node.control.put(keys.may_leave_key(1), "")
    node.heed()
    assert node.asked == [Ask.STAY, Ask.LEAVE]
    node.ranks.listen, node.ends = listen, True
    node.heed()
    assert node.asked[2:] == [Ask.END] * listen
    assert len(node.given) == (not listen), "an agent whose ranks have left ends, too"


def test_a_second_signal_ends_its_own_node_though_the_job_is_about_to_end(tmp_path):
    """The others have all layers, and may be saving them."""
    node = Node(tmp_path)
    node.heed()
    node.control.put(keys.may_leave_key(1), "")
    node.heed()
    node.ends = True
    node.heed()
    assert node.asked == [Ask.STAY, Ask.LEAVE, Ask.END]
    node.pending = [signal.SIGTERM]
    node.heed()
    (verdict,) = node.given
    assert "this node leaves the job at once" in verdict.why
    assert not node.control.has([keys.VERDICT])
