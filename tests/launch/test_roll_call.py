"""Agents that wait for each other say for whom."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.launch import roll_call


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(roll_call, "_LOOK_S", 0.01)
    monkeypatch.setattr(roll_call, "_SAY_AFTER_S", 0.1)
    return dist.HashStore()


def test_all_come(store):
    said = []
    others = [
        threading.Thread(target=roll_call.wait_for_all, args=(store, node, 3, 20.0, said.append))
        for node in (1, 2)
    ]
    for one in others:
        one.start()
    time.sleep(0.5)
    assert len(said) == 1  # by one of them, and not yet again
    assert said[0].startswith("[odyssey] waiting for node(s) 0 of 3, for ")
    roll_call.wait_for_all(store, 0, 3, 20.0, said.append)
    for one in others:
        one.join(20)
    assert len(said) == 1


def test_who_has_not_come_is_named(store):
    said = []
    store.set("odyssey/there/2", "")
    with pytest.raises(
        ConfigError, match=r"node\(s\) 1, 3 of 4 have not come within 1 s\. Start 'odyssey run' on"
    ):
        roll_call.wait_for_all(store, 0, 4, 1.0, said.append)
    assert [one.split(", for")[0] for one in said] == ["[odyssey] waiting for node(s) 1, 3 of 4"]


def test_a_node_that_is_replaced_later_finds_all(store):
    for node in range(3):
        store.set(f"odyssey/there/{node}", "")
    roll_call.wait_for_all(store, 1, 3, 0.0, pytest.fail)
