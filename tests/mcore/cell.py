"""Cells of one job train, and what they have come to is compared: ``python -m tests.mcore.cell FOLDER CASES``.

A whole cell (t = T) takes a step, and writes down part by part the state that it has then, and what a second step is. A
smaller one, whose ranks have several parts each, is filled with that state, does the second step itself, and must have
come to the same; with the same gradients it must come to the same bytes.

So of gangs, where T is how many ranks a whole one has.

``CASES``, as JSON: name -> the sizes T, t, ... of cells, and changes of the example's flags and of Megatron's config
(``config.NAME``). Prints a line ``NAME: ok`` for each that is right on all ranks, which are forked, so that Megatron is
imported once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from odyssey_megatron.plan.placing.slices import EVERYTHING, WHOLE

from odyssey_megatron.mcore.cpu import preload  # isort: skip  # noqa: F401 - the device comes first
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from torch.multiprocessing.reductions import StorageWeakRef

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.execute.reduction import Summands
from odyssey_megatron.mcore.loop import checkpoint
from odyssey_megatron.mcore.loop.data import MicrobatchSource
from odyssey_megatron.mcore.loop.shards import Saved
from odyssey_megatron.mcore.model import float64, groups, parts, wgrad
from odyssey_megatron.mcore.model.model import MegatronModel
from odyssey_megatron.mcore.model.optimizer import LearningRate
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.groups import groups_of_cell
from odyssey_megatron.upstream import smaller
from tests.launch.jobserver import CHECKOUT
from tests.mcore.conftest import MODEL, SCHEDULE
from tests.mcore.forked import all_end

LAYERS = 4
ALMOST = 1e-12
"""Relative, float64: sums over the ranks of a cell and within one of its ranks are rounded in another order."""


def group_of(name: str, store: Any, rank: int, size: int) -> dist.ProcessGroup:
    """One of gloo's, that ``torch.distributed`` does not know."""
    store, kind = dist.PrefixStore(name, store), dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size))
    return group


THIRDS = ((0, WHOLE // 3), (WHOLE // 3, 2 * WHOLE // 3), (2 * WHOLE // 3, WHOLE))
HALVES = ((0, WHOLE // 2), (WHOLE // 2, WHOLE))


def numbers(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Of those that a whole cell's rank has, what is called ``parameter[start:stop]``."""
    if name in tensors:  # no parameter
        return tensors[name]
    inner, _, cut = name.partition("[")
    start, stop = map(int, cut[:-1].split(":"))
    return tensors[inner].reshape(-1)[start:stop]


def names_in(state: Any) -> Iterator[str]:
    """Of all that dictionaries in ``state`` have."""
    if isinstance(state, dict):
        yield from state
    for one in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from names_in(one)


class Rank:
    """Of a cell of ``size`` in a job that has cells of such ``sizes``, whole ones first."""

    def __init__(self, folder: Path, sizes: list[int], size: int, rank: int, changes: dict[str, Any]):
        self.folder, full = folder, sizes[0]
        expert = changes.get("expert_model_parallel_size", 1)
        tensor = full // expert
        experts = changes.get("num_experts")
        cell = Cell.of(rank, tensor=tensor, expert=expert, experts=experts).smaller(size)
        cell = cell.among(dict(enumerate(sizes)))
        own = groups.OwnCell(cell, size, "cpu", data_parallel=True)  # as in a job of unmodified Megatron-LM
        store = dist.FileStore(str(folder / f"store-{size}"), size)
        self.group = group_of("all", store, rank, size)
        own.living.follow(self.group)
        self.groups, self.living = own.groups, own.living
        own.follow(
            {
                name: group_of(name, store, ranks.index(rank), len(ranks))
                for name, ranks in groups_of_cell(cell).items()
            }
        )
        wgrad.install()
        self.model = self._model(cell, own.groups, tensor, changes)
        tied = self.model.spec.shares_embedding
        layout = layout_from_routes(LAYERS, (pipeline_route((0,), (LAYERS,), (0, 1)),), tied=tied)
        self.layout, self.cell, self.of_layers = layout, cell, range(len(layout.all_holders))
        self.tensor_group = own.groups.tp if cell.tensor > 1 else None
        having = Cells(cell, {0: size}).having(0, cell.held_shards[0], tensor)
        self.lanes_group = group_of(f"lanes{having}", store, having.index(rank), len(having))
        """Of those who have the same but for experts."""

    def _model(self, cell: Cell, of_cell: Any, tensor: int, changes: dict[str, Any]) -> MegatronModel:
        sys.path.insert(0, str(CHECKOUT / "examples" / "llama"))
        import corpus
        import pretrain_llama

        flags = {name: value for name, value in changes.items() if "." not in name}
        flags = {**MODEL, "tensor_model_parallel_size": tensor, **flags}
        corpus.VOCAB_SIZE = 256
        spec = pretrain_llama.model_spec(argparse.Namespace(**flags), float64=not flags["bf16"])
        for name, value in changes.items():
            if "." in name:
                setattr(spec.config, name.partition(".")[2], value)
        if spec.config.params_dtype == torch.float64:
            float64.install()
        kept = smaller.kept_whole(spec.config)
        assert not (kept.whole if cell.full_expert > 1 else kept.whole or kept.shards)
        parts.adapt(spec.config, cell)
        samples = [
            {"tokens": torch.arange(i, i + 16) * 7 % 251, "labels": torch.arange(i, i + 16) * 5 % 241}
            for i in range(16)
        ]
        for one in samples:
            one |= {"loss_mask": torch.ones(16), "position_ids": torch.arange(16)}
        return MegatronModel(
            spec,
            forward_step=pretrain_llama.forward_step,
            source=MicrobatchSource(samples, micro_batch_size=1),
            learning_rate=LearningRate(**SCHEDULE),
            num_microbatches=2 * cell.full_lanes,
            seq_length=16,
            micro_batch_size=1,
            groups_of_cell=of_cell,
            cell=cell,
            cuts_activations=flags["sequence_parallel"],
        )

    def gradients(self, step: int) -> dict[int, list[torch.Tensor]]:
        """Part -> those of ``step``, all that ranks of the cell have a share of summed over them."""
        model = self.model
        model.begin_step(step)
        for microbatch in (0, 1):
            model.compute.forward(microbatch, 0, LAYERS, None)
            model.compute.input_grad(microbatch, 0, LAYERS, None)
            model.compute.weight_grad(microbatch, 0, LAYERS)
        sums, dense = list[torch.Tensor](), self.summands(self.cell.held_shards, spread=False)
        found = self.buffers(dense)
        for summands in dense.values():
            shared = [one for own in summands for one in own.partial]
            if not sums:
                sums = [one.clone() for one in shared]
                for one in sums if self.tensor_group is not None else ():
                    dist.all_reduce(one, group=self.tensor_group)
            for view, value in zip(shared, sums, strict=True):
                view.copy_(value)
        for one in found[self.cell.parts.held[0]][0] if self.cell.full_lanes > 1 else ():
            dist.all_reduce(one, group=self.lanes_group)
        model.sums.take_sums()
        return {part: [*dense, *of_experts] for part, (dense, of_experts) in found.items()}

    def summands(self, parts: Iterable[int], *, spread: bool) -> dict[int, list[Summands]]:
        """Part -> what is summed of it, block by block."""
        blocks, sums = self.layout.blocks(), self.model.sums
        return {
            part: [sums.summands(block.first, block.last, part, spread=spread) for block in blocks]
            for part in parts
        }

    def buffers(
        self, dense: dict[int, list[Summands]]
    ) -> dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Part -> the gradients of it, as a whole cell's rank has them, and those of experts; ``dense``: of shards."""
        of_experts = self.summands(self.cell.parts.held, spread=True)
        return {
            part: (
                [one for own in dense[part % self.cell.full_tensor] for one in own.gradients],
                [one for own in of_experts[part] for one in own.gradients],
            )
            for part in self.cell.parts.held
        }

    def totals(self) -> torch.Tensor:
        totals = self.model.end.local_totals()
        dist.all_reduce(totals, group=self.group)
        return totals

    def state(self) -> dict[int, dict[int, dict[str, torch.Tensor]]]:
        """Part -> layer -> all of it."""
        return {
            part: {
                layer: {
                    name: one.clone()
                    for name, one in self.model.transfer.tensors_to_send(layer, part).items()
                }
                for layer in self.of_layers
            }
            for part in self.cell.parts.held
        }

    def shards(self) -> dict[Any, Any]:
        """(key, where it lies) -> what a checkpoint says of it, and its numbers."""
        (block,) = self.model.holdings.chunks
        checkpoint.prepare(self.model.holdings, block)
        metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        state = block.model.module.sharded_state_dict(prefix="", metadata=metadata)
        view = checkpoint.OptimizerView(self.model, self.groups, Saved())
        found = {"model": state, "optimizer": view.sharded_state_dict(state, metadata=metadata)}
        kind = self.model.spec.optimizer_config.optimizer
        assert kind == "sgd" or {"step", "common_step"} & {*names_in(found["optimizer"])}, "Adam goes by it"
        apply_factories(found)
        tensors = [one for one in nested_values(found) if isinstance(one, ShardedTensor)]
        return {
            (one.key, one.global_offset): (
                (one.local_shape, one.global_shape, one.axis_fragmentations),
                one.data.detach().clone(),
            )
            for one in tensors
        }

    def squares(self) -> torch.Tensor:
        total = self.model.end.squared_weights()
        dist.all_reduce(total, group=self.group)
        return total

    def write(self) -> None:
        """Of a whole cell."""
        self.model.holdings.create_layers(self.of_layers, dict.fromkeys(self.of_layers, (EVERYTHING,)))
        self.model.take_layout(self.layout, 0)
        self.gradients(0)
        self.model.end.apply(self.totals(), lambda: None)
        before = self.state()
        gradients = self.gradients(1)
        self.slices_are_stepped_alike()
        gradients = {part: [one.clone() for one in own] for part, own in gradients.items()}
        made = {
            "totals": self.totals(),
            "bytes": {layer: self.model.holdings.moved_bytes(layer) for layer in self.of_layers},
        }
        outcome = self.model.end.apply(made["totals"], lambda: None)
        after = self.state()
        made |= {"squares": self.squares(), "norm": outcome.grad_norm, "shards": self.shards()}
        digests = self.model.holdings.digests().items()
        for part, shard in zip(self.cell.parts.held, self.model.holdings.place.shards, strict=True):
            of_part = {"before": before[part], "gradients": gradients[part], "after": after[part]}
            of_part["digests"] = {name: one for name, one in digests if name.split(".")[1] == shard}
            torch.save(made | of_part, self.folder / f"part{part}.pt")

    def knows_its_place(self) -> None:
        """Whatever number it has among the living: smaller cells before it in the job make that any."""
        living, own = self.living, self.living.rank()
        for number in range(3) if self.tensor_group is not None else ():
            living._rank = number
            assert dist.get_rank(self.tensor_group) == self.cell.tensor_rank
        living._rank = own

    def compare(self) -> None:
        """Of a smaller cell."""
        self.knows_its_place()
        model = self.model
        made = {
            part: torch.load(self.folder / f"part{part}.pt", weights_only=True)
            for part in self.cell.parts.held
        }
        model.holdings.stand_in()
        model.transfer.expect(dict.fromkeys(self.of_layers, (EVERYTHING,)))
        for part, one in made.items():
            for layer in self.of_layers:
                room = model.transfer.tensors_to_fill(layer, part)
                assert [*room] == [*one["before"][layer]], "in the same order"
                for name, tensor in one["before"][layer].items():
                    assert room[name].shape == tensor.shape, name
                    room[name].copy_(tensor)
                model.transfer.filled(layer, part, EVERYTHING, room)
        model.transfer.settled()
        model.take_layout(self.layout, 0)
        self.same(self.state(), made, "before")
        gradients = self.gradients(1)
        exact = model.spec.config.params_dtype == torch.float64
        for part, one in made.items():
            assert [len(buffer) for buffer in gradients[part]] == [len(buffer) for buffer in one["gradients"]]
            for own, theirs in zip(gradients[part], one["gradients"], strict=True):
                assert not exact or (own - theirs).abs().max() <= ALMOST * theirs.abs().max()
        totals = self.totals()
        theirs = next(iter(made.values()))
        assert not exact or torch.allclose(totals, theirs["totals"], rtol=ALMOST, atol=0.0), (totals, theirs)
        self.same_sums(made)
        self.slices_are_stepped_alike()
        copies = [one for own in model.sums._staged.values() for one in own.buffers]
        assert copies or model.holdings.parts.each.shards == 1
        refs, copies = [StorageWeakRef(one.untyped_storage()) for one in copies], []
        outcome = model.end.apply(theirs["totals"], lambda: None)
        assert all(one.expired() for one in refs), "copies of all gradients"
        assert outcome.grad_norm == theirs["norm"]
        self.same(self.state(), made, "after")
        assert torch.allclose(self.squares(), theirs["squares"], rtol=ALMOST, atol=0.0)
        for one in made.values():
            assert one["digests"].items() <= model.holdings.digests().items()
            assert one["bytes"] == {layer: model.holdings.moved_bytes(layer) for layer in self.of_layers}
        shards: dict[Any, Any] = {}
        for one in made.values():
            shards |= one["shards"]
        own = self.shards()
        assert own.keys() <= shards.keys()
        assert self.cell.runs or own.keys() == shards.keys(), (
            "else those of whole ranks have others' experts, too"
        )
        for key, (shapes, tensor) in own.items():
            assert shapes == shards[key][0]
            assert torch.equal(tensor, shards[key][1]), key
        self.weights_of_others(made)

    def slices_are_stepped_alike(self) -> None:
        """As the whole layer, with the gradients that there are: three of them together, and numbers of each part."""
        model = self.model
        for layer in model.holdings.layers:
            weights = {name: one.clone() for name, one in layer.weights().items()}
            found = []
            for spans in ((EVERYTHING,), THIRDS):
                one = model.holdings.optimizer_of(layer, spans)
                for number, _ in enumerate(self.cell.parts.held):
                    for span in spans:
                        one.put(number, span, layer.optimizer.numbers(number, span))
                model.end.learning_rate.set([one], 1, model.microbatches.batches, model.loss_scale)
                one.apply(1.0)
                after = [one.clone() for one in layer.weights().values()]
                for number, _ in enumerate(self.cell.parts.held):
                    for span in (*THIRDS, *HALVES):
                        after += [x.clone() for x in one.numbers(number, span).values()]
                found.append(after)
                for name, weight in layer.weights().items():
                    weight.copy_(weights[name])
            assert len(found[0]) == len(found[1])
            assert all(torch.allclose(a, b, rtol=ALMOST, atol=0.0) for a, b in zip(*found, strict=True))

    def same_sums(self, made: dict[int, Any]) -> None:
        """The gradients are those of the whole cell, as if they had been summed with its."""
        for part, (dense, of_experts) in self.buffers(
            self.summands(self.cell.held_shards, spread=False)
        ).items():
            for own, theirs in zip([*dense, *of_experts], made[part]["gradients"], strict=True):
                own.copy_(theirs)
        self.model.sums.take_sums()

    def weights_of_others(self, made: dict[int, Any]) -> None:
        """As a holder without optimizer state is sent them behind each step."""
        for part, one in made.items():
            for layer in self.of_layers:
                for span in HALVES:
                    weights = self.model.transfer.weights_of(layer, part, [span])
                    for name, tensor in weights.items():
                        tensor.copy_(numbers(one["before"][layer], name))
                    self.model.transfer.weights_arrived(layer, part, [span], weights)
        for part, one in made.items():
            for layer in self.of_layers:
                for name, tensor in self.model.transfer.weights_of(layer, part, [EVERYTHING]).items():
                    assert torch.equal(tensor, numbers(one["before"][layer], name))

    @staticmethod
    def same(state: dict[int, Any], made: dict[int, Any], when: str) -> None:
        for part, layers in state.items():
            for layer, tensors in layers.items():
                theirs = made[part][when][layer]
                assert [*tensors] == [*theirs]
                odd = [name for name, one in tensors.items() if not torch.equal(one, theirs[name])]
                assert not odd, (when, part, layer, odd)


def run(folder: Path, sizes: list[int], size: int, rank: int, changes: dict[str, Any]) -> None:
    one = Rank(folder, sizes, size, rank, changes)
    one.write() if sizes[0] == size else one.compare()


def main(folder: Path, cases: dict[str, tuple[list[int], dict[str, Any]]]) -> None:
    for name, (sizes, changes) in cases.items():
        where = folder / name.replace(" ", "-")
        where.mkdir()
        for size in sizes:
            given = [(where, sizes, size, rank, changes) for rank in range(size)]
            if not all_end(run, given):
                break
        else:
            print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
