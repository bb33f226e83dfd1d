"""Gangs of one job take a step each, and what it has come to is compared: ``python -m tests.mcore.gang FOLDER CASES``.

The first one, which has all experts on one lane, writes down its weights, and the gradients of a step. The others, over
whose lanes experts are spread, as even as can be, are filled with these weights, compute the same microbatches, as many
at once as they have lanes, and must come to the same gradients, losses, counts of tokens and shards of a checkpoint.

``CASES``, as JSON: name -> how many lanes the gangs have, and changes of the example's flags and of Megatron's config
(``config.NAME``). Prints a line ``NAME: ok`` for each that is right on all ranks, which are forked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odyssey_megatron.plan.placing.slices import EVERYTHING

from odyssey_megatron.mcore.cpu import preload  # isort: skip  # noqa: F401 - the device comes first
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.slots import Slots
from odyssey_megatron.mcore.loop import checkpoint
from odyssey_megatron.mcore.loop.data import MicrobatchSource
from odyssey_megatron.mcore.model import float64, groups, wgrad
from odyssey_megatron.mcore.model.experts import in_whole, is_spread
from odyssey_megatron.mcore.model.layers import main_grad
from odyssey_megatron.mcore.model.model import MegatronModel
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.groups import groups_of_cell
from tests.launch.jobserver import CHECKOUT
from tests.mcore.cell import group_of
from tests.mcore.conftest import MODEL
from tests.mcore.forked import all_end

LAYERS, MICROBATCHES, LENGTH = 4, 12, 16
ALMOST = 1e-12
"""Relative, float64: sums over lanes and over microbatches are rounded in another order."""


class Rank:
    """Of a gang of so many ``lanes`` in a job whose largest one has ``full``."""

    def __init__(self, folder: Path, full: int, lanes: int, rank: int, changes: dict[str, Any]):
        flags = {name: value for name, value in changes.items() if "." not in name}
        flags = {**MODEL, **flags}
        tensor = flags["tensor_model_parallel_size"]
        cell = Cell.of(rank, tensor=tensor, expert=lanes)
        self.written = folder / f"shard{cell.tensor_rank}.pt"
        own = groups.OwnCell(cell, tensor * lanes, "cpu", data_parallel=True)
        store = dist.FileStore(str(folder / f"store-{lanes}"), tensor * lanes)
        self.group = group_of("all", store, rank, tensor * lanes)
        own.living.follow(self.group)
        own.follow(
            {
                name: group_of(name, store, ranks.index(rank), len(ranks))
                for name, ranks in groups_of_cell(cell).items()
            }
        )
        alike = [one for one in range(tensor * lanes) if one % tensor == cell.tensor_rank]
        self.lanes_group = group_of(f"lanes{cell.tensor_rank}", store, alike.index(rank), lanes)
        wgrad.install()
        self.cell, self.groups = cell, own.groups
        self.model = self._model(flags, full, changes)
        experts = self.model.spec.config.num_moe_experts
        self.experts = Slots.evenly(experts, lanes).held[own.groups.ep.rank()]
        self.layout = layout_from_routes(
            LAYERS, (pipeline_route((0,), (LAYERS,), tuple(range(MICROBATCHES // lanes))),)
        )
        self.model.holdings.create_layers(range(LAYERS), dict.fromkeys(range(LAYERS), (EVERYTHING,)))
        self.model.take_layout(self.layout, 0)

    def _model(self, flags: dict[str, Any], full: int, changes: dict[str, Any]) -> MegatronModel:
        sys.path.insert(0, str(CHECKOUT / "examples" / "llama"))
        import corpus
        import pretrain_llama

        corpus.VOCAB_SIZE = 256
        # Megatron itself refuses experts that ranks do not divide: a gang is so only once it has lost some.
        spec = pretrain_llama.model_spec(argparse.Namespace(**flags), float64=True)
        spec.config.expert_model_parallel_size = full
        for name, value in changes.items():
            if "." in name:
                setattr(spec.config, name.partition(".")[2], value)
        float64.install()
        samples = [
            {"tokens": torch.arange(i, i + LENGTH) * 7 % 251, "labels": torch.arange(i, i + LENGTH) * 5 % 241}
            for i in range(MICROBATCHES)
        ]
        for one in samples:
            one |= {"loss_mask": torch.ones(LENGTH), "position_ids": torch.arange(LENGTH)}
        return MegatronModel(
            spec,
            forward_step=pretrain_llama.forward_step,
            source=MicrobatchSource(samples, micro_batch_size=1),
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=1,
            groups_of_cell=self.groups,
            cell=self.cell,
        )

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """By the name that each has where all experts are on one lane."""
        for layer in self.model.holdings.layers:
            for name, one in layer.named_parameters():
                if is_spread(one):
                    number, inner = in_whole(name, 1)
                    before, _, behind = inner.partition(".local_experts.0.")
                    name = f"{before}.local_experts.{self.experts[number]}.{behind}"
                yield f"{layer.index}.{name}", one

    def step(self) -> dict[str, torch.Tensor]:
        """Gradients by name, summed over all that have a share of them."""
        model = self.model
        model.begin_step(0)
        for microbatch in range(MICROBATCHES // self.cell.lanes):
            model.compute.forward(microbatch, 0, LAYERS, None)
            model.compute.input_grad(microbatch, 0, LAYERS, None)
            model.compute.weight_grad(microbatch, 0, LAYERS)
        own = model.sums.summands(0, LAYERS, self.cell.tensor_rank, spread=False)
        for one in own.partial:
            if self.cell.tensor > 1:
                dist.all_reduce(one, group=self.groups.tp)
        for one in own.gradients:
            dist.all_reduce(one, group=self.lanes_group)
        return {name: main_grad(one).clone() for name, one in self.parameters()}

    def totals(self) -> torch.Tensor:
        totals = self.model.end.local_totals()
        dist.all_reduce(totals, group=self.group)
        return totals

    def shards(self) -> dict[Any, Any]:
        """(key, where it lies) -> what a checkpoint says of it, and its numbers, of the model's."""
        (block,) = self.model.holdings.chunks
        checkpoint.prepare(self.model.holdings, block)
        found = {}
        for singly in (False, True):
            metadata = {"singleton_local_shards": singly, "chained_optim_avoid_prefix": True}
            state = block.model.module.sharded_state_dict(prefix="", metadata=metadata)
            apply_factories(state)
            for one in nested_values(state):
                if isinstance(one, ShardedTensor):
                    shapes = one.local_shape, one.global_shape, one.axis_fragmentations
                    found[one.key, one.global_offset] = shapes, one.data.detach().clone()
        return found

    def write(self) -> None:
        weights = {name: one.detach().clone() for name, one in self.parameters()}
        torch.save(
            {
                "weights": weights,
                "gradients": self.step(),
                "totals": self.totals(),
                "shards": self.shards(),
            },
            self.written,
        )

    def compare(self) -> None:
        made = torch.load(self.written, weights_only=True)
        names = [name for name, _ in self.parameters()]
        with torch.no_grad():
            for name, one in self.parameters():
                one.copy_(made["weights"][name])
        gradients = self.step()
        assert [*gradients] == names
        for name, one in gradients.items():
            theirs = made["gradients"][name]
            assert theirs.abs().max() > 0, f"{name} would be right with no tokens"
            assert (one - theirs).abs().max() <= ALMOST * theirs.abs().max(), name
        assert torch.allclose(self.totals(), made["totals"], rtol=ALMOST, atol=0.0)
        shards = self.shards()
        for place, (shapes, numbers) in shards.items():
            assert shapes == made["shards"][place][0]
            assert torch.equal(numbers, made["shards"][place][1]), place
        every: list[Any] = [None] * self.group.size()
        dist.all_gather_object(every, (names, [*shards]), group=self.group)
        of_lanes = [one for at, one in enumerate(every) if at % self.cell.tensor == self.cell.tensor_rank]
        assert {name for one, _ in of_lanes for name in one} == made["weights"].keys()
        assert {place for _, one in of_lanes for place in one} == made["shards"].keys()


def run(folder: Path, full: int, lanes: int, rank: int, changes: dict[str, Any]) -> None:
    one = Rank(folder, full, lanes, rank, changes)
    one.write() if lanes == 1 else one.compare()


def main(folder: Path, cases: dict[str, tuple[list[int], dict[str, Any]]]) -> None:
    for name, (lanes, changes) in cases.items():
        where = folder / name.replace(" ", "-")
        where.mkdir()
        for count in (1, *lanes):
            size = count * changes.get("tensor_model_parallel_size", 1)
            given = [(where, max(lanes), count, rank, changes) for rank in range(size)]
            if not all_end(run, given):
                break
        else:
            print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
