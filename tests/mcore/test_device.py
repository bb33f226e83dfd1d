"""Which GPU a rank computes on, where there are some: torch is told how many, and asked which one it was given."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.config import OdysseyConfig  # noqa: E402
from odyssey_megatron.errors import ConfigError  # noqa: E402
from odyssey_megatron.mcore import device  # noqa: E402


@pytest.fixture
def gpus(monkeypatch):
    """Call with how many there are, and this process's place among so many of its node; gives what was chosen."""

    def there(count, local_rank, ranks):
        chosen = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        return chosen

    return there


def test_a_rank_has_a_gpu_of_its_own(gpus):
    chosen = gpus(4, 3, 4)
    device.install(OdysseyConfig())
    assert chosen == [3]
    assert device.sharing(OdysseyConfig()) == 1


@pytest.mark.parametrize(
    ("local_rank", "count", "of_it", "sharers"), [(3, 1, 0, 5), (3, 2, 1, 3), (4, 8, 4, 1)]
)
def test_with_gloo_ranks_share_gpus(gpus, local_rank, count, of_it, sharers):
    chosen, config = gpus(count, local_rank, 5), OdysseyConfig(backend="gloo")
    device.install(config)
    assert chosen == [of_it]
    assert device.sharing(config) == sharers


@pytest.mark.parametrize(("count", "backend"), [(0, "auto"), (2, "auto"), (0, "gloo")])
def test_a_rank_without_one_says_what_to_do(gpus, count, backend):
    gpus(count, 2, 4)
    with pytest.raises(ConfigError, match=f"needs GPU 2, torch sees {count}.*--odyssey-backend gloo"):
        device.install(OdysseyConfig(backend=backend))
