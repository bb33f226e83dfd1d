"""The world between hosts as a tree of small groups: gloo itself, a thread for each rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from odyssey_megatron.config import OdysseyConfig  # noqa: E402
from odyssey_megatron.rebuild import hosts  # noqa: E402
from odyssey_megatron.rebuild.abort_gloo import GlooAbort  # noqa: E402
from odyssey_megatron.rebuild.library import Hosts  # noqa: E402


def rooted(options, root):
    options.rootRank = root
    return options


def operations(group, rank, size):
    """What each operation leaves on this rank."""
    found = {}
    for name in ("SUM", "MAX"):
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, name)
        total = torch.tensor([rank + 0.1, -rank], dtype=torch.float64)
        group.allreduce([total], options).wait()
        found[name] = total.tolist()
    group.barrier().wait()
    for root in range(size):
        told = torch.tensor([rank])
        group.broadcast([told], rooted(dist.BroadcastOptions(), root)).wait()
        assert told.item() == root
    rows = [torch.empty(2, dtype=torch.int64) for _ in range(size)]
    group.allgather([rows], [torch.tensor([rank, -(2**60)])]).wait()
    found["rows"] = [one.tolist() for one in rows]
    flat = torch.empty(2 * size)
    group._allgather_base(flat, torch.tensor([rank, 0.5])).wait()
    found["flat"] = flat.tolist()
    at_root = [[torch.empty(1) for _ in range(size)]] if rank == 1 else []
    group.gather(at_root, [torch.tensor([rank * 0.5])], rooted(dist.GatherOptions(), 1)).wait()
    found["gathered"] = [one.item() for one in at_root[0]] if at_root else []
    mine = torch.empty(1)
    parts = [[torch.tensor([one * 3.0]) for one in range(size)]] if rank == size - 1 else []
    group.scatter([mine], parts, rooted(dist.ScatterOptions(), size - 1)).wait()
    found["scattered"] = mine.item()
    return found


@pytest.mark.parametrize("size", [3, 4, 5, 11])
def test_all_operations_over_a_tree(size, monkeypatch):
    monkeypatch.setattr(hosts, "FAN", 3)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store, library = dist.HashStore(), Hosts(OdysseyConfig(device="cpu"))

    def run(rank):
        abort = GlooAbort()
        connect = library.connector(abort)
        group = connect(library.rendezvous(store, "world", rank, size, abort), rank, size, None)
        return type(group).__name__, operations(group, rank, size)

    with ThreadPoolExecutor(size) as ranks:
        found = list(ranks.map(run, range(size)))
    assert {name for name, _ in found} == {"Tree" if size > 3 else "ProcessGroupGloo"}
    sums = {tuple(one["SUM"]) for _, one in found}
    assert len(sums) == 1, "the same bytes everywhere"
    assert sums.pop() == pytest.approx((sum(range(size)) + 0.1 * size, -sum(range(size))))
    for rank, (_, one) in enumerate(found):
        assert one["MAX"] == [size - 1 + 0.1, 0.0]
        assert one["rows"] == [[other, -(2**60)] for other in range(size)]
        assert one["flat"] == [value for other in range(size) for value in (other, 0.5)]
        assert one["gathered"] == ([other * 0.5 for other in range(size)] if rank == 1 else [])
        assert one["scattered"] == rank * 3.0


def test_nobody_is_connected_with_many():
    """16,384 ranks: whoever stands for others twice is in three groups, most are in one."""
    size = 16_384
    of = [hosts.groups_of(rank, size) for rank in range(size)]
    assert max(map(len, of)) == 3
    assert sum(len(one) == 1 for one in of) > 0.96 * size
    assert all(len(group) <= hosts.FAN for one in of for group in one)
    # Everybody is in a group with whoever stands for it, up to the one that joins all.
    assert all(one[-1].start % (hosts.FAN * one[-1].step) == 0 for one in of)
    assert of[0][-1] == range(0, size, 1024)
