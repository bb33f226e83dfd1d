"""The default group of code that is not ours, after ranks have died."""

from __future__ import annotations

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

from odyssey_megatron.rebuild.abort_gloo import GlooAbort  # noqa: E402
from odyssey_megatron.rebuild.hosts import StagedGroup  # noqa: E402
from odyssey_megatron.rebuild.registry import register  # noqa: E402
from odyssey_megatron.rebuild.world import LivingWorld  # noqa: E402


@pytest.fixture
def living():
    """Three ranks have been living; this one is left. The default group of this process stays what it is."""
    store, gloo = dist.HashStore(), dist.ProcessGroup.BackendType.GLOO
    left = dist.ProcessGroup(store, 0, 1)
    left._register_backend(
        torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
    )
    left._set_default_backend(gloo)
    world = LivingWorld(0, 3, "cpu")
    world.repeat_with(lambda work: work(left))
    return world


@pytest.mark.parametrize("operation", ["_allgather_base", "all_gather_single", "allgather"])
def test_room_for_the_dead_stays_as_it_is(living, operation):
    """As Megatron's timers make it; which of these torch calls for it depends on its version."""
    if not hasattr(dist.ProcessGroup, operation):
        pytest.skip("not in this version of torch")
    room, mine = torch.zeros(3), torch.ones(1)
    rooms = [list(room.split(1))] if operation == "allgather" else room
    getattr(living, operation)(rooms, [mine] if operation == "allgather" else mine)
    assert room.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("of_the_world", [True, False])
def test_a_barrier_lies_between_hosts_where_there_is_a_gpu(of_the_world, monkeypatch):
    """torch names the machine's accelerator, which gloo's group knows nothing of."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda", 0))
    inner = dist.ProcessGroup(dist.HashStore(), 0, 1)
    gloo = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    inner._register_backend(torch.device("cpu"), gloo, backend)
    inner._set_default_backend(gloo)
    group = StagedGroup(inner, GlooAbort())
    if of_the_world:
        world = LivingWorld(0, 3, "cuda")
        world.follow(group)
        dist.barrier(group=world)
    else:
        options = dist.BarrierOptions()
        options.device = torch.device("cuda", 0)
        group.barrier(options).wait()


@pytest.mark.parametrize("newest", [True, False])
def test_torch_knows_a_group_that_it_has_not_made(newest, monkeypatch):
    """With torch's own function for it, which came with 2.13, or without."""
    if not newest:
        monkeypatch.delattr(c10d, "_register_pg_in_world", raising=False)
    elif not hasattr(c10d, "_register_pg_in_world"):
        pytest.skip("not in this version of torch")
    store, name = dist.HashStore(), f"registered-{newest}"
    group = dist.ProcessGroup(store, 1, 2)
    group._set_group_name(name)
    register(group, name, backend="fake", device="cpu", store=store, ranks={3: 0, 5: 1})
    assert dist.get_backend(group) == "fake"
    assert dist.get_process_group_ranks(group) == [3, 5]
    assert dist.get_global_rank(group, 1) == 5
    assert c10d._resolve_process_group(name) is group
    c10d._cleanup_process_group_global_state(group)
    assert group not in c10d._world.pg_map
    assert group not in c10d._world.pg_to_tag
    assert not c10d._world.tags_to_pg.get(f"ptd:{name}")
