"""Steps of one rank's model under the rules of CUDA (``tests/strict``): ``python -m tests.mcore.host_waits FOLDER
CASES``.

Real layers of Megatron's, forward steps, sources and totals; what other ranks of its cell would send is left out.
``CASES``, as JSON: name -> changes of the example's flags and of Megatron's config (``config.NAME``). Prints for each a
line of JSON: [name, where the host has waited for its device in the second step before its agreement, where behind it].
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from traceback import extract_stack
from typing import Any

from odyssey_megatron.plan.placing.slices import EVERYTHING

from odyssey_megatron.mcore.cpu import preload  # isort: skip  # noqa: F401 - the device comes first
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.mcore.cpu import device as cpu_device
from odyssey_megatron.mcore.loop.balance import Balance
from odyssey_megatron.mcore.loop.data import MicrobatchSource
from odyssey_megatron.mcore.loop.outcome import shown
from odyssey_megatron.mcore.model import float64, groups, parts, wgrad
from odyssey_megatron.mcore.model.model import MegatronModel
from odyssey_megatron.mcore.model.optimizer import LearningRate
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.groups import groups_of_cell
from tests.launch.jobserver import CHECKOUT
from tests.mcore.conftest import MODEL, SCHEDULE
from tests.mcore.forked import all_end
from tests.strict.device import DEVICE, DeviceMemory, on_device
from tests.strict.machine import Device, Event, Machine

LAYERS, MICROBATCHES, LENGTH = 4, 2, 16


class Watched(Device):
    """Knows the line that has made the host wait, of Megatron's or Odyssey's."""

    def synchronize(self, why: str, event: Event | None = None) -> None:
        ours = [
            f"{one.filename.rpartition('odyssey_megatron/')[2].rpartition('/site-packages/')[2]}: {one.name}"
            for one in extract_stack()
            if "megatron" in one.filename and "/tests/" not in one.filename and "/cpu_" not in one.filename
        ]
        super().synchronize([why, *ours][-1], event)


def make_it_the_gpu() -> None:
    """The strict device, of this process, in the place of the CPU."""
    cpu_device.CPU = DEVICE
    torch.cuda.is_available = lambda: True
    torch.Tensor.pin_memory = torch._C.TensorBase.pin_memory
    torch.Tensor.cuda = lambda self, device=None, non_blocking=False: self.to(
        DEVICE, non_blocking=non_blocking
    )


def nobody_sends(size: int) -> dist.ProcessGroup:
    """A group whose other ranks are not there."""
    kind, group = dist.ProcessGroup.BackendType.CUSTOM, dist.ProcessGroup(FakeStore(), 0, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(0, size))
    return group


def model_of(changes: dict[str, Any]) -> MegatronModel:
    sys.path.insert(0, str(CHECKOUT / "examples" / "llama"))
    import corpus
    import pretrain_llama

    flags = MODEL | {name: value for name, value in changes.items() if "." not in name}
    cell = Cell.of(
        0, tensor=1, context=flags["context_parallel_size"], expert=flags["expert_model_parallel_size"]
    )
    cell = cell.smaller(flags.get("size", 0))
    own = groups.OwnCell(cell, cell.size, "cpu", data_parallel=True)
    own.living.follow(nobody_sends(cell.size))
    of_cell = groups_of_cell(cell).items()
    own.follow({name: nobody_sends(len(ranks)) for name, ranks in of_cell})
    wgrad.install()
    float64.install()
    corpus.VOCAB_SIZE = 256
    spec = pretrain_llama.model_spec(argparse.Namespace(**flags), float64=True)
    for name, value in changes.items():
        if "." in name:
            setattr(spec.config, name.partition(".")[2], value)
    parts.adapt(spec.config, cell)
    samples = [
        {"tokens": torch.arange(i, i + LENGTH), "labels": torch.arange(i, i + LENGTH)}
        | {"loss_mask": torch.ones(LENGTH), "position_ids": torch.arange(LENGTH)}
        | ({"cu_seqlens": torch.tensor([0, 4, LENGTH])} if changes.get("packed") else {})
        for i in range(64)
    ]
    model = MegatronModel(
        spec,
        forward_step=pretrain_llama.forward_step,
        source=MicrobatchSource(samples, micro_batch_size=1),
        learning_rate=LearningRate(**SCHEDULE),
        num_microbatches=MICROBATCHES * cell.full_lanes,
        seq_length=LENGTH,
        micro_batch_size=1,
        groups_of_cell=own.groups,
        cell=cell,
    )
    tied = spec.shares_embedding
    layout = layout_from_routes(
        LAYERS, (pipeline_route((0,), (LAYERS,), tuple(range(MICROBATCHES))),), tied=tied
    )
    model.holdings.create_layers(range(LAYERS + tied), dict.fromkeys(range(LAYERS + tied), (EVERYTHING,)))
    model.take_layout(layout, 0)
    if changes.get("packed"):
        model.microbatches.balance = Balance(MICROBATCHES, steps=9)
    return model


def waits(model: MegatronModel, device: Watched, step: int) -> tuple[list[str], list[str]]:
    """Before the agreement of ``step``, and behind it."""
    began = len(device.syncs)
    model.begin_step(step)
    for microbatch in range(MICROBATCHES):
        model.compute.forward(microbatch, 0, LAYERS, None)
        model.compute.input_grad(microbatch, 0, LAYERS, None)
        model.compute.weight_grad(microbatch, 0, LAYERS)
    totals = model.end.local_totals()
    before = device.syncs[began:]
    totals = totals.cpu()  # as the agreement does
    began = len(device.syncs)
    outcome = model.end.apply(totals.nan_to_num(), lambda: None)
    model.future.show(outcome.losses, outcome.num_microbatches)
    shown(outcome, model.loss_names)
    return before, device.syncs[began:]


def run(name: str, changes: dict[str, Any]) -> None:
    make_it_the_gpu()
    machine = Machine(seed=1)
    device = machine.devices[0] = Watched(machine, 0)

    def main() -> None:
        with on_device(DeviceMemory(device)):
            model = model_of(changes)
            waits(model, device, 0)
            before, behind = waits(model, device, 1)
            print(json.dumps([name, sorted(set(before)), sorted(set(behind))]), flush=True)

    machine.host("rank 0", main)
    machine.run()


def main(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    for name, changes in cases.items():
        all_end(run, [(name, changes)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
