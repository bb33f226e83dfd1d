"""Two processes save; one dies while it writes, and the other does it again, alone: python save_and_die.py RANK FOLDER.

``FOLDER/checkpoint`` is then the checkpoint. The process exits with 0 if it is complete and loads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from odyssey_megatron.mcore.cpu import device as cpu_device

cpu_device.install()

import torch  # noqa: E402 - the CPU device comes first
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # noqa: E402

from odyssey_megatron.mcore.loop import saving  # noqa: E402

LAYERS = 6


def state_of(layers: Any, value: float) -> dict[str, Any]:
    return {
        f"layer{one}": ShardedTensor.from_rank_offsets(f"layer{one}", torch.full((4 + one, 3), value + one))
        for one in layers
    }


def world(folder: Path, rank: int, size: int) -> None:
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def die_instead_of_writing() -> None:
    write = FileSystemWriterAsync.write_preloaded_data

    def dying(*args: Any, **kwargs: Any) -> Any:
        write(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(dying)


def main(rank: int, folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    saving.install()
    if rank == 1:
        die_instead_of_writing()
    world(folder, rank, 2)
    with contextlib.suppress(RuntimeError):  # the other's end
        saving.begin(checkpoint)
        dist_checkpointing.save(state_of(range(rank, LAYERS, 2), 0.5), str(checkpoint))
        sys.exit("the save went through although a rank had died")
    assert not checkpoint.exists(), "it is not complete"
    assert len(list(folder.glob(".odyssey-*"))) == 1
    dist.destroy_process_group()
    world(folder, 0, 1)
    saving.begin(checkpoint)
    dist_checkpointing.save(state_of(range(LAYERS), 0.5), str(checkpoint))
    assert saving.damage(checkpoint) == []
    assert not list(folder.glob(".odyssey-*")), "something was left"
    loaded = dist_checkpointing.load(state_of(range(LAYERS), 0.0), str(checkpoint))
    for one in range(LAYERS):
        assert torch.equal(loaded[f"layer{one}"], torch.full((4 + one, 3), 0.5 + one))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
