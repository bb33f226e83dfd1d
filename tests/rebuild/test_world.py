"""The default group of code that is not ours, after ranks have died."""

from __future__ import annotations

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

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
